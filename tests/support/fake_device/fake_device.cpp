// The fake accelerator behind tests/support/fake_device: torch's PrivateUse1 device over host memory.
//
// One thread is the device. It works through the queues of all streams; a stream runs its jobs in order, streams are
// ordered among each other by events alone. Every tensor's pages are mapped twice: at the address tensors show, where
// the host may not read or write unless the test opens it, and at an address only the device thread uses.

#include <ATen/EmptyTensor.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>

#include <sys/mman.h>
#include <unistd.h>

#include <array>
#include <chrono>
#include <condition_variable>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <thread>
#include <utility>
#include <vector>

namespace {

using Clock = std::chrono::steady_clock;
using Seconds = std::chrono::duration<double>;

constexpr auto kFake = c10::DeviceType::PrivateUse1;
constexpr c10::DeviceIndex kDevices = 2;  // two, so that code which ignores the device index can be caught
constexpr int kUnwritten = 0xDD;          // what fresh and freed memory holds

thread_local c10::DeviceIndex current_device = 0;
thread_local std::array<c10::StreamId, kDevices> current_streams{};  // 0 is the default stream

c10::Stream stream_of(c10::DeviceIndex device, c10::StreamId id) {
  return c10::Stream(c10::Stream::UNSAFE, c10::Device(kFake, device), id);
}

c10::DeviceIndex checked(c10::DeviceIndex device) {
  TORCH_CHECK(device >= -1 && device < kDevices, "eplbdev:", int(device), " does not exist; there are ", int(kDevices));
  return device == -1 ? current_device : device;
}

c10::Stream current_stream(c10::DeviceIndex device) {
  return stream_of(device, current_streams[device]);
}

// One recording of an event: a place in a stream's queue.
struct Marker {
  bool done = false;
  Clock::time_point at{};
};

struct Job {
  std::function<void()> work;        // a copy or a fill
  std::shared_ptr<Marker> awaited;   // the stream goes on when this is done
  std::shared_ptr<Marker> reached;   // done when the stream gets here
};

struct Queue {
  std::deque<Job> jobs;
  bool busy = false;
  bool held = false;
  Seconds delay{0};
  Clock::time_point due{};  // of the first job, once its delay runs
  bool idle() const { return jobs.empty() && !busy; }
};

struct Block {
  Block(size_t nbytes, c10::Stream owner, bool open) : nbytes(nbytes), owner(owner) {
    const size_t page = sysconf(_SC_PAGESIZE);
    mapped = (nbytes + page - 1) / page * page;
    const int file = memfd_create("eplbdev", MFD_CLOEXEC);
    TORCH_CHECK(file >= 0 && ftruncate(file, off_t(mapped)) == 0, "eplbdev: no memory for ", nbytes, " bytes");
    address = map(file, open ? PROT_READ | PROT_WRITE : PROT_NONE);
    memory = map(file, PROT_READ | PROT_WRITE);
    close(file);
    std::memset(memory, kUnwritten, mapped);
  }
  ~Block() {
    munmap(address, mapped);
    munmap(memory, mapped);
  }
  Block(const Block&) = delete;
  Block& operator=(const Block&) = delete;

  void open(bool readable) { mprotect(address, mapped, readable ? PROT_READ | PROT_WRITE : PROT_NONE); }

  char* address;  // what tensors show
  char* memory;   // the same pages, for the device thread
  size_t nbytes, mapped;
  c10::Stream owner;                // current at allocation; the memory is reused in its order
  std::vector<c10::Stream> users;   // Tensor.record_stream

 private:
  char* map(int file, int protection) const {
    void* at = mmap(nullptr, mapped, protection, MAP_SHARED, file, 0);
    TORCH_CHECK(at != MAP_FAILED, "eplbdev: cannot map ", mapped, " bytes");
    return static_cast<char*>(at);
  }
};

class Engine {
 public:
  static Engine& get() {
    static auto* engine = new Engine;  // never destroyed: tensors outlive static destructors
    return *engine;
  }

  void enqueue(const c10::Stream& stream, std::function<void()> work) {
    std::lock_guard lock(mutex_);
    raise();
    push(stream, {std::move(work), nullptr, nullptr});
  }

  std::shared_ptr<Marker> record(const c10::Stream& stream) {
    std::lock_guard lock(mutex_);
    raise();
    return mark(stream);
  }

  void await(const c10::Stream& stream, std::shared_ptr<Marker> marker) {
    std::lock_guard lock(mutex_);
    raise();
    push(stream, {nullptr, std::move(marker), nullptr});
  }

  bool done(const Marker& marker) {
    std::lock_guard lock(mutex_);
    raise();
    return marker.done;
  }

  bool idle(const c10::Stream& stream) {
    std::lock_guard lock(mutex_);
    raise();
    return queue(stream).idle();
  }

  void synchronize(const std::shared_ptr<Marker>& marker, const char* what) {
    std::unique_lock lock(mutex_);
    raise();
    const bool reached = changed_.wait_for(lock, limit_, [&] { return marker->done || stopped_; });
    TORCH_CHECK(reached, "eplbdev: ", what, " not reached within ", limit_.count(),
                " s: its stream is held, delayed, or waits for an event that nothing completes");
    raise();
  }

  void synchronize(c10::DeviceIndex device) {
    std::vector<std::shared_ptr<Marker>> markers;
    {
      std::lock_guard lock(mutex_);
      raise();
      // Streams of negative id are no program's: events that were never recorded wait there.
      for (auto& [key, queue] : queues_)
        if (key.first == device && key.second >= 0 && !queue.idle()) markers.push_back(mark(stream_of(key.first, key.second)));
    }
    for (const auto& marker : markers) synchronize(marker, "the end of a stream's queue was");
  }

  c10::StreamId new_stream() {
    std::lock_guard lock(mutex_);
    return ++streams_;
  }

  std::shared_ptr<Block> allocate(size_t nbytes, const c10::Stream& owner) {
    std::lock_guard lock(mutex_);
    auto block = std::make_shared<Block>(nbytes, owner, open_);
    blocks_.insert(block.get());
    allocated_[owner.device_index()] += nbytes;
    return block;
  }

  // Memory is freed in the order of the stream it was allocated on, as by a caching allocator: a copy still queued on
  // another stream then finds it overwritten, unless record_stream named that stream.
  void retire(std::shared_ptr<Block> block) {
    std::lock_guard lock(mutex_);
    blocks_.erase(block.get());
    allocated_[block->owner.device_index()] -= block->nbytes;
    if (stopped_) return;
    for (const auto& user : block->users) push(block->owner, {nullptr, mark(user), nullptr});
    const auto owner = block->owner;
    push(owner, {[block = std::move(block)] { std::memset(block->memory, kUnwritten, block->nbytes); }, nullptr, nullptr});
  }

  void use(Block& block, const c10::Stream& user) {
    std::lock_guard lock(mutex_);
    if (user != block.owner) block.users.push_back(user);
  }

  void open(bool readable) {
    std::lock_guard lock(mutex_);
    open_ = readable;
    for (auto* block : blocks_) block->open(readable);
  }

  void hold(const c10::Stream& stream, bool held) {
    std::lock_guard lock(mutex_);
    queue(stream).held = held;
    changed_.notify_all();
  }

  void delay(const c10::Stream& stream, double seconds) {
    std::lock_guard lock(mutex_);
    queue(stream).delay = Seconds(seconds);
    queue(stream).due = {};
    changed_.notify_all();
  }

  void fail(const c10::Stream& stream, std::string message) {
    std::lock_guard lock(mutex_);
    push(stream, {[message = std::move(message)] { throw std::runtime_error(message); }, nullptr, nullptr});
  }

  int64_t pending(const c10::Stream& stream) {
    std::lock_guard lock(mutex_);
    const auto& of = queue(stream);
    int64_t count = of.busy;
    for (const auto& job : of.jobs) count += bool(job.work);
    return count;
  }

  int64_t allocated(c10::DeviceIndex device) {
    std::lock_guard lock(mutex_);
    return allocated_[device];
  }

  void set_limit(double seconds) {
    std::lock_guard lock(mutex_);
    limit_ = Seconds(seconds);
  }

  bool reset() {
    std::unique_lock lock(mutex_);
    for (auto& [key, queue] : queues_) {
      queue.held = false;
      queue.delay = Seconds(0);
      queue.due = {};
    }
    changed_.notify_all();
    const bool drained = changed_.wait_for(lock, limit_, [&] {
      for (auto& [key, queue] : queues_)
        if (!queue.idle()) return false;
      return true;
    });
    error_.clear();
    return drained;
  }

  void stop() {
    {
      std::lock_guard lock(mutex_);
      stopped_ = true;
      changed_.notify_all();
    }
    if (thread_.joinable()) thread_.join();
  }

 private:
  using Key = std::pair<c10::DeviceIndex, c10::StreamId>;

  Queue& queue(const c10::Stream& stream) { return queues_[Key(stream.device_index(), stream.id())]; }

  // As on a real device, an asynchronous failure comes up at a later call and stays until `reset`.
  void raise() {
    TORCH_CHECK(!stopped_, "eplbdev: the device is shut down");
    TORCH_CHECK(error_.empty(), "eplbdev: an earlier asynchronous operation failed: ", error_);
  }

  std::shared_ptr<Marker> mark(const c10::Stream& stream) {
    auto marker = std::make_shared<Marker>();
    push(stream, {nullptr, nullptr, marker});
    return marker;
  }

  void push(const c10::Stream& stream, Job job) {
    if (!thread_.joinable() && !stopped_) thread_ = std::thread([this] { serve(); });
    queue(stream).jobs.push_back(std::move(job));
    changed_.notify_all();
  }

  void serve() {
    std::unique_lock lock(mutex_);
    while (!stopped_) {
      bool moved = false;
      auto wake = Clock::time_point::max();
      for (auto& [key, queue] : queues_) {  // a map: streams made meanwhile invalidate nothing
        if (queue.held || queue.jobs.empty()) continue;
        Job& first = queue.jobs.front();
        if (first.awaited && !first.awaited->done) continue;
        if (first.work && queue.delay.count() > 0) {
          if (queue.due == Clock::time_point{})
            queue.due = Clock::now() + std::chrono::duration_cast<Clock::duration>(queue.delay);
          if (Clock::now() < queue.due) {
            wake = std::min(wake, queue.due);
            continue;
          }
          queue.due = {};
        }
        Job job = std::move(first);
        queue.jobs.pop_front();
        if (job.work) run(lock, queue, std::move(job.work));
        if (job.reached) *job.reached = {true, Clock::now()};
        moved = true;
        changed_.notify_all();
      }
      if (moved) continue;
      if (wake == Clock::time_point::max())
        changed_.wait(lock);
      else
        changed_.wait_until(lock, wake);
    }
  }

  void run(std::unique_lock<std::mutex>& lock, Queue& queue, std::function<void()> work) {
    queue.busy = true;
    const bool failed = !error_.empty();
    std::string error;
    lock.unlock();
    try {
      if (!failed) work();
    } catch (const c10::Error& caught) {
      error = caught.what_without_backtrace();
    } catch (const std::exception& caught) {
      error = caught.what();
    }
    work = nullptr;  // may free tensors, which takes the lock
    lock.lock();
    if (error_.empty()) error_ = error;
    queue.busy = false;
  }

  std::mutex mutex_;
  std::condition_variable changed_;
  std::thread thread_;
  std::map<Key, Queue> queues_;
  std::set<Block*> blocks_;
  std::array<int64_t, kDevices> allocated_{};
  c10::StreamId streams_ = 0;
  std::string error_;
  Seconds limit_{60};
  bool open_ = false;
  bool stopped_ = false;
};

// ---- memory -------------------------------------------------------------------------------------------------------

struct DeviceAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t nbytes) override {
    const c10::Device device(kFake, current_device);
    if (nbytes == 0) return {nullptr, nullptr, &release, device};
    auto* block = new std::shared_ptr<Block>(Engine::get().allocate(nbytes, current_stream(current_device)));
    return {(*block)->address, block, &release, device};
  }
  c10::DeleterFnPtr raw_deleter() const override { return nullptr; }
  void copy_data(void*, const void*, size_t) const override {
    TORCH_CHECK(false, "eplbdev: storages are copied through tensors only");
  }
  static void release(void* context) {
    if (context == nullptr) return;
    std::unique_ptr<std::shared_ptr<Block>> block(static_cast<std::shared_ptr<Block>*>(context));
    Engine::get().retire(std::move(*block));
  }
};

DeviceAllocator device_allocator;
REGISTER_ALLOCATOR(kFake, &device_allocator);

std::shared_ptr<Block> block_of(const c10::DataPtr& data) {
  return *static_cast<std::shared_ptr<Block>*>(data.get_context());
}

struct PinnedAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t nbytes) override {
    void* data = nullptr;
    TORCH_CHECK(posix_memalign(&data, 512, std::max<size_t>(nbytes, 1)) == 0, "eplbdev: no memory to pin");
    std::lock_guard lock(mutex);
    blocks[static_cast<const char*>(data)] = nbytes;
    return {data, data, &release, c10::Device(c10::DeviceType::CPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* dst, const void* src, size_t nbytes) const override { default_copy_data(dst, src, nbytes); }
  static void release(void* data);
  bool owns(const void* data) {
    std::lock_guard lock(mutex);
    auto next = blocks.upper_bound(static_cast<const char*>(data));
    return next != blocks.begin() && data < std::prev(next)->first + std::prev(next)->second;
  }
  std::mutex mutex;
  std::map<const char*, size_t> blocks;
};

PinnedAllocator& pinned_allocator() {
  static auto* allocator = new PinnedAllocator;
  return *allocator;
}

void PinnedAllocator::release(void* data) {
  auto& self = pinned_allocator();
  std::lock_guard lock(self.mutex);
  self.blocks.erase(static_cast<const char*>(data));
  std::free(data);
}

// ---- streams, events, devices -------------------------------------------------------------------------------------

struct GuardImpl final : c10::impl::DeviceGuardImplInterface {
  using Event = std::shared_ptr<Marker>;  // the latest recording

  c10::DeviceType type() const override { return kFake; }
  c10::Device exchangeDevice(c10::Device device) const override {
    return {kFake, std::exchange(current_device, checked(device.index()))};
  }
  c10::Device getDevice() const override { return {kFake, current_device}; }
  void setDevice(c10::Device device) const override { current_device = checked(device.index()); }
  void uncheckedSetDevice(c10::Device device) const noexcept override {
    if (device.index() >= 0 && device.index() < kDevices) current_device = device.index();
  }
  c10::DeviceIndex deviceCount() const noexcept override { return kDevices; }
  void synchronizeDevice(const c10::DeviceIndex device) const override { Engine::get().synchronize(checked(device)); }

  c10::Stream getStream(c10::Device device) const override { return current_stream(checked(device.index())); }
  c10::Stream getDefaultStream(c10::Device device) const override { return stream_of(checked(device.index()), 0); }
  c10::Stream getNewStream(c10::Device device, int) const override {
    return stream_of(checked(device.index()), Engine::get().new_stream());
  }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool) const override { return getNewStream(device, 0); }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    auto& current = current_streams[stream.device_index()];
    return stream_of(stream.device_index(), std::exchange(current, stream.id()));
  }
  void* getStreamNativeHandle(const c10::Stream stream) const override { return reinterpret_cast<void*>(stream.id()); }
  bool queryStream(const c10::Stream& stream) const override { return Engine::get().idle(stream); }
  void synchronizeStream(const c10::Stream& stream) const override {
    Engine::get().synchronize(Engine::get().record(stream), "the end of a stream's queue was");
  }
  void recordDataPtrOnStream(const c10::DataPtr& data, const c10::Stream& stream) const override {
    if (data.get_context() != nullptr) Engine::get().use(*block_of(data), stream);
  }

  void record(void** event, const c10::Stream& stream, const c10::DeviceIndex, const c10::EventFlag) const override {
    auto marker = Engine::get().record(stream);
    if (*event == nullptr) *event = new Event;
    *static_cast<Event*>(*event) = std::move(marker);
  }
  void block(void* event, const c10::Stream& stream) const override {
    Engine::get().await(stream, *static_cast<Event*>(event));
  }
  bool queryEvent(void* event) const override { return Engine::get().done(**static_cast<Event*>(event)); }
  void synchronizeEvent(void* event) const override {
    Engine::get().synchronize(*static_cast<Event*>(event), "an event was");
  }
  double elapsedTime(void* start, void* end, const c10::DeviceIndex) const override {
    const auto passed = (*static_cast<Event*>(end))->at - (*static_cast<Event*>(start))->at;
    return std::chrono::duration<double, std::milli>(passed).count();
  }
  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override { delete static_cast<Event*>(event); }
};

C10_REGISTER_GUARD_IMPL(PrivateUse1, GuardImpl);

// ---- tensors ------------------------------------------------------------------------------------------------------

std::atomic<bool> keeps_host_memory{true};

// A CPU tensor over the bytes of `tensor`, for the device thread; keeps them mapped.
at::Tensor seen_by_device(const at::Tensor& tensor, at::ScalarType dtype) {
  auto* data = static_cast<char*>(const_cast<void*>(tensor.const_data_ptr()));
  std::function<void(void*)> keep = [](void*) {};
  if (keeps_host_memory) keep = [storage = tensor.storage()](void*) {};
  if (tensor.device().type() == kFake) {
    auto block = block_of(tensor.storage().data_ptr());
    data = block->memory + (data - block->address);
    keep = [block = std::move(block)](void*) {};  // not the storage: freeing it early is a fault that tests look for
  } else {
    TORCH_CHECK(tensor.is_cpu(), "eplbdev: cannot copy from or to ", tensor.device());
  }
  return at::from_blob(data, tensor.sizes(), tensor.strides(), keep, at::TensorOptions().dtype(dtype));
}

// Copies between equal dtypes move bits, also of dtypes the CPU has no arithmetic for.
at::ScalarType carrier(at::ScalarType dtype) {
  switch (c10::elementSize(dtype)) {
    case 1: return at::kByte;
    case 2: return at::kShort;
    case 4: return at::kInt;
    case 8: return at::kLong;
    default: return dtype;
  }
}

at::Tensor copy_from(const at::Tensor& src, const at::Tensor& dst, bool non_blocking) {
  TORCH_CHECK(src.is_neg() == dst.is_neg() && src.is_conj() == dst.is_conj(), "eplbdev: resolve neg and conj first");
  const auto spread = src.expand(dst.sizes());
  if (dst.numel() == 0) return dst;
  const bool same = src.scalar_type() == dst.scalar_type();
  auto to = seen_by_device(dst, same ? carrier(dst.scalar_type()) : dst.scalar_type());
  auto from = seen_by_device(spread, same ? carrier(src.scalar_type()) : src.scalar_type());

  auto& engine = Engine::get();
  const auto device = src.is_cpu() ? dst.device() : src.device();
  const auto stream = current_stream(device.index());
  const bool peers = !src.is_cpu() && !dst.is_cpu() && src.device() != dst.device();
  if (peers) engine.await(stream, engine.record(current_stream(dst.device().index())));
  engine.enqueue(stream, [to = std::move(to), from = std::move(from)]() mutable {
    at::AutoDispatchBelowADInplaceOrView below;
    to.copy_(from);
  });
  if (peers) engine.await(current_stream(dst.device().index()), engine.record(stream));
  if ((src.is_cpu() || dst.is_cpu()) && !non_blocking) engine.synchronize(engine.record(stream), "a blocking copy was");
  return dst;
}

at::Tensor& fill(at::Tensor& self, const at::Scalar& value) {
  if (self.numel() == 0) return self;
  auto to = seen_by_device(self, self.scalar_type());
  Engine::get().enqueue(current_stream(self.device().index()), [to = std::move(to), value]() mutable {
    at::AutoDispatchBelowADInplaceOrView below;
    to.fill_(value);
  });
  return self;
}

at::Tensor& zero(at::Tensor& self) {
  if (self.numel() == 0) return self;
  auto to = seen_by_device(self, carrier(self.scalar_type()));
  Engine::get().enqueue(current_stream(self.device().index()), [to = std::move(to)]() mutable {
    at::AutoDispatchBelowADInplaceOrView below;
    to.zero_();
  });
  return self;
}

c10::Device target(std::optional<c10::Device> device, std::optional<bool> pin_memory) {
  TORCH_CHECK(!pin_memory.value_or(false), "eplbdev: only CPU tensors can be pinned");
  return {kFake, checked(device.has_value() ? device->index() : -1)};
}

at::Tensor empty(at::IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
                 std::optional<c10::Device> device, std::optional<bool> pin_memory,
                 std::optional<at::MemoryFormat> memory_format) {
  const c10::DeviceGuard guard(target(device, pin_memory));
  return at::detail::empty_generic(size, &device_allocator, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                   c10::dtype_or_default(dtype), memory_format);
}

at::Tensor empty_strided(at::IntArrayRef size, at::IntArrayRef stride, std::optional<at::ScalarType> dtype,
                         std::optional<at::Layout>, std::optional<c10::Device> device, std::optional<bool> pin_memory) {
  const c10::DeviceGuard guard(target(device, pin_memory));
  return at::detail::empty_strided_generic(size, stride, &device_allocator,
                                           c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                           c10::dtype_or_default(dtype));
}

void resize_storage(const c10::Storage& storage, size_t nbytes) {
  const c10::DeviceGuard guard(storage.device());
  auto fresh = device_allocator.allocate(nbytes);
  const size_t kept = std::min(nbytes, storage.nbytes());
  if (kept > 0)
    Engine::get().enqueue(current_stream(storage.device().index()),
                          [to = block_of(fresh), from = block_of(storage.data_ptr()), kept] {
                            std::memcpy(to->memory, from->memory, kept);
                          });
  storage.set_data_ptr_noswap(std::move(fresh));
  storage.set_nbytes(nbytes);
}

const at::Tensor& resize(const at::Tensor& self, at::IntArrayRef size, std::optional<at::MemoryFormat> memory_format) {
  TORCH_CHECK(!memory_format.has_value() || *memory_format == at::MemoryFormat::Contiguous,
              "eplbdev: resize_ makes contiguous tensors only");
  self.unsafeGetTensorImpl()->set_sizes_contiguous(size);
  const size_t nbytes = (self.storage_offset() + self.numel()) * self.element_size();
  if (nbytes > self.storage().nbytes()) resize_storage(self.storage(), nbytes);
  return self;
}

at::Tensor copy_from_and_resize(const at::Tensor& src, const at::Tensor& dst) {
  if (src.sizes() != dst.sizes()) resize(dst, src.sizes(), std::nullopt);
  return copy_from(src, dst, false);
}

void record_stream(at::Tensor& self, c10::Stream stream) {
  c10::impl::VirtualGuardImpl(kFake).recordDataPtrOnStream(self.storage().data_ptr(), stream);
}

// The rest runs on the CPU, over blocking copies; never a view, whose aliasing copies would break in silence.
void on_cpu(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  at::native::cpu_fallback(op, stack, /*error_on_views=*/true);
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&on_cpu>()); }

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", TORCH_FN(empty));
  m.impl("empty_strided", TORCH_FN(empty_strided));
  m.impl("as_strided", TORCH_FN(at::native::as_strided_tensorimpl));
  m.impl("view", TORCH_FN(at::native::view));
  m.impl("unfold", TORCH_FN(at::native::unfold));
  m.impl("_reshape_alias", TORCH_FN(at::native::_reshape_alias));
  m.impl("set_.source_Storage", TORCH_FN(static_cast<at::Tensor& (*)(at::Tensor&, at::Storage)>(at::native::set_)));
  m.impl("set_.source_Storage_storage_offset", TORCH_FN(at::native::set_storage_cpu_));
  m.impl("set_.source_Tensor", TORCH_FN(at::native::set_tensor_));
  m.impl("resize_", TORCH_FN(resize));
  m.impl("_copy_from", TORCH_FN(copy_from));
  m.impl("_copy_from_and_resize", TORCH_FN(copy_from_and_resize));
  m.impl("fill_.Scalar", TORCH_FN(fill));
  m.impl("zero_", TORCH_FN(zero));
  m.impl("record_stream", TORCH_FN(record_stream));
}

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return kDevices; }
  void setCurrentDevice(c10::DeviceIndex device) const override { current_device = checked(device); }
  c10::DeviceIndex getCurrentDevice() const override { return current_device; }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex device) const override {
    return std::exchange(current_device, checked(device));
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex device) const override { return exchangeDevice(device); }
  bool isPinnedPtr(const void* data) const override { return pinned_allocator().owns(data); }
  c10::Allocator* getPinnedMemoryAllocator() const override { return &pinned_allocator(); }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t nbytes) const override {
    resize_storage(storage, nbytes);
  }
};

const bool registered = [] {
  at::RegisterPrivateUse1HooksInterface(new Hooks);
  return true;
}();

}  // namespace

// ---- what the Python module calls, through ctypes -----------------------------------------------------------------

extern "C" {
void eplbdev_hold(int device, int64_t stream, int held) { Engine::get().hold(stream_of(device, stream), held != 0); }
void eplbdev_delay(int device, int64_t stream, double seconds) {
  Engine::get().delay(stream_of(device, stream), seconds);
}
void eplbdev_fail(int device, int64_t stream, const char* message) {
  Engine::get().fail(stream_of(device, stream), message);
}
int64_t eplbdev_pending(int device, int64_t stream) { return Engine::get().pending(stream_of(device, stream)); }
int64_t eplbdev_memory_allocated(int device) { return Engine::get().allocated(device); }
void eplbdev_open(int readable) { Engine::get().open(readable != 0); }
void eplbdev_keep_host_memory(int keep) { keeps_host_memory = keep != 0; }
void eplbdev_set_limit(double seconds) { Engine::get().set_limit(seconds); }
int eplbdev_reset() { return Engine::get().reset(); }
void eplbdev_stop() { Engine::get().stop(); }
}
