/* A libnccl.so.2 for machines without a GPU: grouped sends and receives of bytes between processes of one host.

   Real NCCL bindings load it in place of NVIDIA's library. "Device memory" is host memory, a "stream" is a thread of
   this library that does the groups queued on it in order, and connections are Unix sockets in the abstract namespace,
   named after the unique id. Like the real one it is strict: no stream 0, nothing on a communicator that is still in
   progress, one size at both ends. stub_fault() makes the next calls fail, hang, or report an asynchronous error. */

#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

enum { OK = 0, CUDA_ERROR = 1, SYSTEM_ERROR = 2, INVALID_ARGUMENT = 4, INVALID_USAGE = 5, REMOTE_ERROR = 6, IN_PROGRESS = 7 };
enum { LOOK_MS = 2, HEADER = 8, ID_NBYTES = 128 };
static const size_t SIZES[] = {1, 1, 4, 4, 8, 8, 2, 4, 8, 2, 1, 1};

typedef struct { char internal[ID_NBYTES]; } ncclUniqueId;
typedef struct { size_t size; unsigned magic; unsigned version; int blocking; } Config; /* the start of ncclConfig_t */

typedef struct Op {
  int send, peer;
  char *buffer;
  uint64_t nbytes, done; /* done counts the header too */
  uint64_t header;
  struct Op *next;
} Op;

typedef struct Comm {
  int size, rank, *fd;
  ncclUniqueId id;
  atomic_int state, abort, running;
  pthread_t init_thread;
  int init_joined;
  struct Group *pending; /* handed over by a group end, not yet on its stream */
} Comm;

typedef struct Stream {
  pthread_t thread;
  pthread_mutex_t lock;
  pthread_cond_t changed;
  struct Group *first, *last;
  uint64_t queued, done;
  int closing;
} Stream;

typedef struct Group {
  Comm *comm;
  Stream *stream;
  Op *first, *last;
  struct Group *next;
} Group;

static __thread int depth;
static __thread Group *open_group;
static char fault[32];
static atomic_int num_comms, num_aborted, num_destroyed, reported_version = 23203;

/* --- what tests ask ------------------------------------------------------------------------------------------------ */

void stub_fault(const char *kind) { snprintf(fault, sizeof fault, "%s", kind); }
static int faulty(const char *kind) { return strcmp(fault, kind) == 0; }
void stub_version(int version) { reported_version = version; }
int stub_group_depth(void) { return depth; }
int stub_num_comms(void) { return num_comms; }
int stub_num_aborted(void) { return num_aborted; }
int stub_num_destroyed(void) { return num_destroyed; }

/* --- streams ------------------------------------------------------------------------------------------------------- */

static void fail(Comm *comm, int state) {
  int success = OK;
  atomic_compare_exchange_strong(&comm->state, &success, state);
}

/* Move what can be moved of one operation; 1 when it is complete, 0 when not yet, -1 on an error of the group. */
static int step(Comm *comm, Op *op) {
  int fd = comm->fd[op->peer];
  while (op->done < HEADER + op->nbytes) {
    int in_header = op->done < HEADER;
    char *at = in_header ? (char *)&op->header + op->done : op->buffer + (op->done - HEADER);
    size_t left = in_header ? HEADER - op->done : HEADER + op->nbytes - op->done;
    ssize_t n = op->send ? send(fd, at, left, MSG_NOSIGNAL) : recv(fd, at, left, 0);
    if (n < 0 && (errno == EAGAIN || errno == EINTR)) return 0;
    if (n <= 0) { fail(comm, REMOTE_ERROR); return -1; }
    op->done += n;
    if (!op->send && op->done == HEADER && op->header != op->nbytes) { fail(comm, INVALID_USAGE); return -1; }
  }
  return 1;
}

/* The operations with one peer in one direction follow one another; all others move side by side. */
static void run(Group *group) {
  Comm *comm = group->comm;
  char *blocked = malloc(2 * comm->size);
  for (int left = 1; left;) {
    if (comm->abort || faulty("async")) {
      if (!comm->abort) fail(comm, REMOTE_ERROR);
      break;
    }
    memset(blocked, faulty("hang"), 2 * comm->size);
    left = faulty("hang");
    int moved = 0, broken = 0;
    for (Op *op = group->first; op; op = op->next) {
      int lane = 2 * op->peer + op->send;
      if (op->done == HEADER + op->nbytes) continue;
      left = 1;
      if (blocked[lane]) continue;
      uint64_t before = op->done;
      int outcome = step(comm, op);
      moved |= op->done != before;
      broken |= outcome < 0;
      blocked[lane] = outcome != 1;
    }
    if (broken) break;
    if (left && !moved) usleep(50);
  }
  free(blocked);
}

static void free_group(Group *group) {
  for (Op *op = group->first, *next; op; op = next) { next = op->next; free(op); }
  free(group);
}

static void *stream_main(void *argument) {
  Stream *stream = argument;
  pthread_mutex_lock(&stream->lock);
  for (;;) {
    while (!stream->first && !stream->closing) pthread_cond_wait(&stream->changed, &stream->lock);
    Group *group = stream->first;
    if (!group) break;
    stream->first = group->next;
    pthread_mutex_unlock(&stream->lock);
    run(group);
    atomic_fetch_sub(&group->comm->running, 1);
    free_group(group);
    pthread_mutex_lock(&stream->lock);
    stream->done++;
    pthread_cond_broadcast(&stream->changed);
  }
  pthread_mutex_unlock(&stream->lock);
  return NULL;
}

void *stub_stream_create(void) {
  Stream *stream = calloc(1, sizeof *stream);
  pthread_mutex_init(&stream->lock, NULL);
  pthread_cond_init(&stream->changed, NULL);
  pthread_create(&stream->thread, NULL, stream_main, stream);
  return stream;
}

uint64_t stub_stream_mark(Stream *stream) {
  pthread_mutex_lock(&stream->lock);
  uint64_t queued = stream->queued;
  pthread_mutex_unlock(&stream->lock);
  return queued;
}

int stub_stream_done(Stream *stream, uint64_t mark) {
  pthread_mutex_lock(&stream->lock);
  int done = stream->done >= mark;
  pthread_mutex_unlock(&stream->lock);
  return done;
}

void stub_stream_destroy(Stream *stream) {
  pthread_mutex_lock(&stream->lock);
  stream->closing = 1;
  pthread_cond_broadcast(&stream->changed);
  pthread_mutex_unlock(&stream->lock);
  pthread_join(stream->thread, NULL);
  free(stream);
}

static void launch(Group *group) {
  Stream *stream = group->stream;
  group->next = NULL;
  atomic_fetch_add(&group->comm->running, 1);
  pthread_mutex_lock(&stream->lock);
  if (stream->first) stream->last->next = group; else stream->first = group;
  stream->last = group;
  stream->queued++;
  pthread_cond_broadcast(&stream->changed);
  pthread_mutex_unlock(&stream->lock);
}

/* --- connecting ---------------------------------------------------------------------------------------------------- */

static socklen_t address_of(struct sockaddr_un *address, const ncclUniqueId *id, int rank) {
  memset(address, 0, sizeof *address);
  address->sun_family = AF_UNIX;
  char *name = address->sun_path + 1; /* abstract */
  int n = sprintf(name, "stub-nccl-");
  for (int i = 0; i < 16; i++) n += sprintf(name + n, "%02x", (unsigned char)id->internal[i]);
  n += sprintf(name + n, "-%d", rank);
  return offsetof(struct sockaddr_un, sun_path) + 1 + n;
}

static int transfer_int(Comm *comm, int fd, int *value, int sending) {
  size_t done = 0;
  while (done < sizeof *value && !comm->abort) {
    struct pollfd look = {fd, sending ? POLLOUT : POLLIN, 0};
    if (poll(&look, 1, LOOK_MS) <= 0) continue;
    ssize_t n = sending ? send(fd, (char *)value + done, sizeof *value - done, MSG_NOSIGNAL)
                        : recv(fd, (char *)value + done, sizeof *value - done, 0);
    if (n == 0 || (n < 0 && errno != EAGAIN && errno != EINTR)) return -1;
    if (n > 0) done += n;
  }
  return comm->abort ? -1 : 0;
}

static void *init_main(void *argument) {
  Comm *comm = argument;
  int waiting = comm->size - 1 - comm->rank, listener = -1, outcome = OK;
  struct sockaddr_un address;
  socklen_t length = address_of(&address, &comm->id, comm->rank);
  listener = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
  if (listener < 0 || bind(listener, (void *)&address, length) || listen(listener, comm->size)) outcome = SYSTEM_ERROR;
  if (faulty("init-fail")) outcome = SYSTEM_ERROR;
  while (faulty("init-hang") && !comm->abort) usleep(1000);
  for (int peer = 0; peer < comm->rank && outcome == OK && !comm->abort; peer++) {
    length = address_of(&address, &comm->id, peer);
    int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    while (connect(fd, (void *)&address, length) && !comm->abort) usleep(1000);
    comm->fd[peer] = fd;
    if (transfer_int(comm, fd, &comm->rank, 1)) outcome = REMOTE_ERROR;
  }
  while (waiting && outcome == OK && !comm->abort) {
    struct pollfd look = {listener, POLLIN, 0};
    if (poll(&look, 1, LOOK_MS) <= 0) continue;
    int peer = -1, fd = accept4(listener, NULL, NULL, SOCK_CLOEXEC | SOCK_NONBLOCK);
    if (fd < 0) continue;
    if (transfer_int(comm, fd, &peer, 0) || peer <= comm->rank || peer >= comm->size) { close(fd); outcome = REMOTE_ERROR; break; }
    comm->fd[peer] = fd;
    waiting--;
  }
  if (listener >= 0) close(listener);
  comm->state = comm->abort ? SYSTEM_ERROR : outcome;
  return NULL;
}

static int init(Comm **out, int size, ncclUniqueId id, int rank, int blocking) {
  *out = NULL;
  if (size < 1 || rank < 0 || rank >= size) return INVALID_ARGUMENT;
  Comm *comm = calloc(1, sizeof *comm);
  comm->size = size, comm->rank = rank, comm->id = id, comm->state = IN_PROGRESS;
  comm->fd = malloc(size * sizeof(int));
  for (int i = 0; i < size; i++) comm->fd[i] = -1;
  num_comms++;
  pthread_create(&comm->init_thread, NULL, init_main, comm);
  *out = comm;
  if (!blocking) return IN_PROGRESS;
  pthread_join(comm->init_thread, NULL);
  comm->init_joined = 1;
  return comm->state;
}

static void release(Comm *comm) {
  comm->abort = 1;
  if (!comm->init_joined) pthread_join(comm->init_thread, NULL);
  while (comm->running) usleep(100);
  if (comm->pending) free_group(comm->pending);
  for (int i = 0; i < comm->size; i++) if (comm->fd[i] >= 0) close(comm->fd[i]);
  free(comm->fd);
  free(comm);
  num_comms--;
}

/* --- the API ------------------------------------------------------------------------------------------------------- */

int ncclGetVersion(int *version) { *version = reported_version; return OK; }

int ncclGetUniqueId(ncclUniqueId *id) {
  if (faulty("no-id")) return SYSTEM_ERROR;
  memset(id, 0x5a, sizeof *id);
  return getrandom(id, 16, 0) == 16 ? OK : SYSTEM_ERROR;
}

const char *ncclGetErrorString(int result) {
  static const char *texts[] = {"no error", "unhandled cuda error", "unhandled system error", "internal error",
      "invalid argument", "invalid usage", "remote process exited or there was a network error", "NCCL operation in progress"};
  return result >= 0 && result < 8 ? texts[result] : "unknown result code";
}

const char *ncclGetLastError(Comm *comm) { (void)comm; return "stub"; }

int ncclCommInitRankConfig(Comm **comm, int size, ncclUniqueId id, int rank, Config *config) {
  return init(comm, size, id, rank, !config || config->blocking != 0);
}

int ncclCommInitRank(Comm **comm, int size, ncclUniqueId id, int rank) { return init(comm, size, id, rank, 1); }

int ncclCommGetAsyncError(Comm *comm, int *state) {
  if (!comm) return INVALID_ARGUMENT;
  *state = comm->state;
  if (comm->pending && comm->state == IN_PROGRESS) { /* reported once, launched after that */
    Group *group = comm->pending;
    comm->pending = NULL;
    comm->state = OK; /* before the stream's thread may report an error in its place */
    launch(group);
  }
  return OK;
}

int ncclCommCount(Comm *comm, int *count) { *count = comm->size; return OK; }
int ncclCommUserRank(Comm *comm, int *rank) { *rank = comm->rank; return OK; }
int ncclCommCuDevice(Comm *comm, int *device) { (void)comm; *device = 0; return OK; }

int ncclCommFinalize(Comm *comm) { return comm->state == IN_PROGRESS || comm->running ? INVALID_USAGE : OK; }

int ncclCommDestroy(Comm *comm) {
  if (comm->state == IN_PROGRESS || comm->running) return INVALID_USAGE; /* the real one would wait, perhaps for ever */
  num_destroyed++;
  release(comm);
  return OK;
}

int ncclCommAbort(Comm *comm) {
  if (faulty("abort-hang")) sleep(3);
  num_aborted++;
  release(comm);
  return OK;
}

static int enqueue(int sending, void *buffer, size_t count, int datatype, int peer, Comm *comm, Stream *stream) {
  if (faulty(sending ? "fail-send" : "fail-recv")) return SYSTEM_ERROR;
  if (!comm || comm->state == IN_PROGRESS) return INVALID_USAGE;
  if (comm->state != OK) return comm->state;
  if (!stream || !depth || datatype < 0 || datatype > 11 || peer < 0 || peer >= comm->size || peer == comm->rank)
    return INVALID_ARGUMENT;
  if (open_group && (open_group->comm != comm || open_group->stream != stream)) return INVALID_USAGE;
  if (!open_group) {
    open_group = calloc(1, sizeof *open_group);
    open_group->comm = comm, open_group->stream = stream;
  }
  Op *op = calloc(1, sizeof *op);
  op->send = sending, op->peer = peer, op->buffer = buffer, op->nbytes = count * SIZES[datatype];
  if (sending) op->header = op->nbytes;
  if (open_group->first) open_group->last->next = op; else open_group->first = op;
  open_group->last = op;
  return OK;
}

int ncclSend(const void *buffer, size_t count, int datatype, int peer, Comm *comm, Stream *stream) {
  return enqueue(1, (void *)buffer, count, datatype, peer, comm, stream);
}

int ncclRecv(void *buffer, size_t count, int datatype, int peer, Comm *comm, Stream *stream) {
  return enqueue(0, buffer, count, datatype, peer, comm, stream);
}

int ncclGroupStart(void) { depth++; return OK; }

int ncclGroupEnd(void) {
  if (!depth) return INVALID_USAGE;
  if (--depth) return OK;
  Group *group = open_group;
  open_group = NULL;
  if (faulty("fail-group")) { if (group) free_group(group); return SYSTEM_ERROR; }
  if (!group) return OK;
  if (group->comm->init_joined) { launch(group); return OK; } /* a blocking communicator */
  group->comm->pending = group;
  group->comm->state = IN_PROGRESS;
  return IN_PROGRESS;
}

/* Bindings that link all of NCCL want these to exist. */
#define REFUSED(name) int name(void) { return INVALID_USAGE; }
REFUSED(ncclAllGather) REFUSED(ncclAllReduce) REFUSED(ncclBcast) REFUSED(ncclBroadcast) REFUSED(ncclCommInitAll)
REFUSED(ncclCommSplit) REFUSED(ncclReduce) REFUSED(ncclReduceScatter)
