"""The error catalogue: every code, the text it starts with, and what ``eplb explain`` says about it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Entry:
    """One code of the catalogue.

    Parameters
    ----------
    text : str
        How the message starts; ``{fields}`` are filled in by the error.
    meaning : str
        What the code says, in a sentence or two.
    when : str
        At which point of which call it happens, and on which ranks.
    situations : tuple of str
        What usually lies behind it.
    solutions : tuple of str
        What to do, most likely remedy first.
    """

    text: str
    meaning: str
    when: str
    situations: tuple[str, ...]
    solutions: tuple[str, ...]


CATALOGUE: dict[str, Entry] = {}


def _add(code: str, text: str, *, meaning: str, when: str, situations: list[str], solutions: list[str]) -> None:
    if code in CATALOGUE:
        raise ValueError(f"{code} stands in the catalogue twice")
    CATALOGUE[code] = Entry(text, meaning, when, tuple(situations), tuple(solutions))


# --- C: configuration -------------------------------------------------------------------------------------------------

_add(
    "EPLB-C001",
    "Invalid EPLB configuration: {problem}.",
    meaning="A field of EPLBConfig is unknown, has the wrong type or is out of range.",
    when="While the configuration is built, before any plugin is looked at, on the rank that builds it.",
    situations=[
        "a misspelt key, in the call or in the JSON that a host hands on (vLLM's --eplb-config)",
        "a size or interval of zero",
        "a JSON made for another release",
    ],
    solutions=[
        "correct the field that the message names",
        "see 'Configuration' in the README for the fields and their defaults",
    ],
)
_add(
    "EPLB-C002",
    "Async EPLB is only supported with the default policy.",
    meaning="use_async is True, and the policy is not 'default'.",
    when="While the configuration is built.",
    situations=["a custom policy was set, and use_async was left at its default, True"],
    solutions=["set use_async=False", "or leave policy='default'"],
)
_add(
    "EPLB-C003",
    "log_balancedness_interval must be greater than 0.",
    meaning="log_balancedness is on, and its interval is not positive.",
    when="While the configuration is built, with log_balancedness=True.",
    situations=["0 was meant to switch the log off"],
    solutions=["set log_balancedness=False to switch the log off", "or give a positive interval"],
)
_add(
    "EPLB-C004",
    "{communicator} communicator is incompatible with async EPLB due to {reason}. "
    "Use {alternatives} instead, or leave communicator unset for automatic selection.",
    meaning="The backend that was named does not declare itself safe to run beside the model's own kernels.",
    when="In select() and when the Communicator is built, with use_async=True and the backend named.",
    situations=[
        "an NCCL backend was named while async EPLB is on (the default)",
        "a third-party backend does not declare async_safe, which counts as unsafe",
    ],
    solutions=["name one of the backends the message offers", "leave communicator unset", "or set use_async=False"],
)
_add(
    "EPLB-C005",
    "{communicator} communicator cannot be used: {reason}.",
    meaning="The backend that was named is installed, but a rule excludes it here.",
    when="In select() and when the Communicator is built, on the rank where the rule fires.",
    situations=[
        "the library behind the backend is not installed or does not load",
        "the weights live on a device the backend does not handle",
        "elastic=True was asked for, in EPLBConfig or select(), and the backend does not declare elastic_safe",
        "successor() was called on a communicator whose backend does not declare elastic_safe",
    ],
    solutions=[
        "follow the install hint in the message",
        "run 'eplb backends' to see what is usable here",
        "name another backend",
    ],
)
_add(
    "EPLB-C006",
    "Unknown communicator {communicator!r}.",
    meaning="No installed plugin offers a backend of that name.",
    when="In select() and when the Communicator is built.",
    situations=[
        "the plugin's distribution is not installed in this environment",
        "a misspelt name",
        "EPLB_PLUGINS does not list it",
    ],
    solutions=["pip install the plugin (for instance eplb-gloo)", "run 'eplb backends' for the names that exist"],
)
_add(
    "EPLB-C007",
    "No usable EPLB backend.",
    meaning="No backend was named, and every installed one is excluded by a rule or is taken only when named.",
    when="In select() and when the Communicator is built.",
    situations=["only the core is installed", "the only usable backends are not async-safe and use_async is on"],
    solutions=["pip install eplb-gloo", "read the reason that the message gives for each candidate"],
)
_add(
    "EPLB-C008",
    "Invalid options for backend {backend}: {problem}.",
    meaning="The options given to the Communicator do not fit the backend's options model.",
    when="When the Communicator is built.",
    situations=["a misspelt option", "an option of another backend"],
    solutions=["correct the option that the message names", "see the plugin's README for its options"],
)
_add(
    "EPLB-C009",
    "The control plane cannot be made: {problem}.",
    meaning="A control plane needs a store that all ranks reach, and for each rank an address that the others reach. "
    "from_process_group makes the store, and needs a group that moves small CPU tensors.",
    when="In ControlPlane.from_process_group, on every rank of the group, whichever rank failed; in "
    "ControlPlane.from_store, on the rank that failed; when the members meet, if ranks turn out to be on several "
    "hosts, or no port of ports= is free.",
    situations=[
        "an NCCL-only group was passed",
        "ranks run on several hosts, or in several containers of one, and host= was not given",
        "host= is the address of another machine, or of a gateway",
        "host= is a name that resolves to loopback on its own machine (127.0.1.1 in /etc/hosts)",
        "a firewall between the ranks drops connections to the store's port",
        "ports= allows fewer ports than there are ranks on the host, or others use them",
        "the store supports only one connection: for instance one written in Python without clone()",
    ],
    solutions=[
        "pass the CPU (gloo) group of the expert-parallel group",
        "give host=, on each rank the address of its own interface at which all ranks reach it ('ip addr' lists them)",
        "open a range of ports between the ranks and name it with ports=(low, high); see 'Ports' in the README",
    ],
)
_add(
    "EPLB-C010",
    "The Communicator cannot be built: {problem}.",
    meaning="An argument of the Communicator does not fit the weights, the control plane or the chosen backend.",
    when="When the Communicator is built or the backend connects, on the rank that was given the argument.",
    situations=[
        "landing= was given, and the backend packs its landing memory",
        "another communicator of that name is open on this control plane",
        "device_group= is missing, or is not the group of the members, for a backend that needs it",
        "an observer was given to a second communicator",
        "successor() was given the control plane, or the store, of the communicator that it succeeds",
    ],
    solutions=[
        "correct the argument that the message names",
        "close the other communicator first, or give the new one another name=, equal on all ranks",
    ],
)
_add(
    "EPLB-C011",
    "Unknown staging allocator {staging!r}.",
    meaning="No installed plugin offers a staging allocator of that name.",
    when="When the Communicator is built with EPLBConfig(staging=...).",
    situations=["a misspelt name", "the plugin is not installed, or was skipped"],
    solutions=[
        "pip install eplb-cupy for cupy_pinned and cupy_device",
        "leave staging unset for torch's own allocator",
    ],
)
_add(
    "EPLB-C012",
    "Unknown policy {policy!r}.",
    meaning="No installed plugin offers a placement policy of that name.",
    when="When the Communicator is built with EPLBConfig(policy=...).",
    situations=["a misspelt name", "the plugin is not installed"],
    solutions=["use policy='default'", "install the plugin that offers it"],
)

_add(
    "EPLB-C013",
    "Cannot write a new backend: {problem}.",
    meaning="'eplb new-backend' writes a distribution into a new or empty folder, under a name that nobody has.",
    when="In 'eplb new-backend'. Nothing has been written, except where the folder turns out not to be writable.",
    situations=[
        "the folder holds files already, or cannot be made",
        "the name has characters that no package name may have, or does not start with a letter",
        "an installed plugin has the name, or the distribution eplb-<name> is one of eplb-core's own",
    ],
    solutions=[
        "name an empty folder as the second argument",
        "choose a name of letters, digits, '-' and '_' that 'eplb backends' does not show",
    ],
)
_add(
    "EPLB-C014",
    "Staging allocator {staging!r} cannot be used: {reason}.",
    meaning="The allocator is installed, but does not work on this machine, for these weights, or with this backend.",
    when="When the Communicator is built with EPLBConfig(staging=...); also in 'eplb backends --probe'.",
    situations=[
        "its library does not load, or there is no driver",
        "two CuPy distributions are installed, or one for another CUDA than torch's",
        "an allocator of device memory was named for a backend that stages on the host, or the other way round",
    ],
    solutions=[
        "follow the reason given",
        "run 'eplb backends --probe'",
        "leave staging unset for torch's own allocator",
    ],
)

_add(
    "EPLB-C015",
    "The LoadBalancer cannot be built: {problem}.",
    meaning="An argument of the LoadBalancer does not fit the configuration, the communicator or this machine.",
    when="When the LoadBalancer is built: on the rank that was given the argument, or on all where they differ.",
    situations=[
        "the ranks were given different intervals, windows, policies or other fields that must be the same on all",
        "num_redundant_experts kept its default, 0, and the map has more slots than there are logical experts",
        "the policy that is named needs a library that is not installed",
        "the configuration is another one than the communicator's",
    ],
    solutions=["correct the argument or the field that the message names"],
)
_add(
    "EPLB-C016",
    "The source {source!r} cannot be used: {problem}.",
    meaning="What a source of experts is built from does not hold them in a form in which they can be supplied.",
    when="When a CheckpointSource or HostMemorySource is built.",
    situations=[
        "a folder without experts under the names of Qwen3-MoE, DeepSeek-V3 or Mixtral",
        "layers= names layers of the model that have no routed experts",
        "tensors= names tensors that the checkpoint does not have",
    ],
    solutions=["correct the argument", "give a source of your own: an object with holds() and read()"],
)

# --- D: discovery -----------------------------------------------------------------------------------------------------

_add(
    "EPLB-D001",
    "Plugin {entry_point!r} of {distribution} {version} was skipped: {reason}.",
    meaning="An installed plugin could not be loaded. The other plugins are used without it.",
    when="In discover(), as a failure of the catalogue. Raised with EPLB_STRICT=1, and as the cause of EPLB-C006 when "
    "the plugin's backend is asked for by name.",
    situations=[
        "the plugin's module raises while it is imported",
        "a hook is misspelt, lacks @hookimpl, or takes an argument that the contract does not have",
        "the plugin was built for another API version",
    ],
    solutions=[
        "upgrade the plugin together with eplb-core",
        "pip uninstall the distribution named",
        "report it to its author",
    ],
)
_add(
    "EPLB-D002",
    "{kind} {name!r} is claimed by more than one distribution: {claimants}.",
    meaning="Two installed distributions offer the same name. None is taken: a guess could move weights with the wrong "
    "one.",
    when="When that name is selected (the automatic choice skips it); in discover() with EPLB_STRICT=1.",
    situations=[
        "a fork of a plugin is installed beside the original",
        "an old distribution name was not uninstalled",
        "two releases of one distribution are on sys.path, in one folder or in two",
    ],
    solutions=[
        "pip uninstall all but one of the distributions named; the message says in which folder each was found",
        "where the entry points have different names, list in EPLB_PLUGINS only the one you want",
    ],
)
_add(
    "EPLB-D003",
    "Backend {backend} could not be loaded: {reason}.",
    meaning="The backend's class could not be imported, is incomplete, or is not the only implementation of its hooks.",
    when="When the Communicator is built, after the backend was chosen; and at a call whose hook returns something "
    "else than the contract says. Another backend is never taken instead.",
    situations=[
        "a hook lacks @hookimpl, or returns nothing",
        "an observer implements a hook without wrapper=True",
        "the target named by the plugin does not exist",
    ],
    solutions=[
        "correct the class that the message names",
        "run 'eplb verify NAME' where the testing extra is installed",
    ],
)
_add(
    "EPLB-D004",
    "Backend {backend} failed its probe: {reason}.",
    meaning="The backend's library is present but does not work on this machine.",
    when="When the Communicator is built, before the backend is built; also in 'eplb backends --probe'.",
    situations=["a driver is missing or too old", "a transport that the options require is not available"],
    solutions=["follow the reason given", "run 'eplb backends --probe'", "name another backend"],
)
_add(
    "EPLB-D005",
    "EPLB_PLUGINS names {entry_point!r}, which no installed distribution offers.",
    meaning="EPLB_PLUGINS lists an entry point of the group eplb_core.plugins that does not exist here.",
    when="In discover(), as a failure of the catalogue; raised only when EPLB_STRICT=1.",
    situations=["a misspelt name", "the plugin is installed in another environment"],
    solutions=["correct EPLB_PLUGINS: a comma-separated list of entry points", "pip install the plugin"],
)
_add(
    "EPLB-D006",
    "{target!r} could not be loaded: {reason}.",
    meaning="The module or the attribute that a plugin's descriptor names cannot be imported.",
    when="When the backend, staging allocator, policy or options model behind the descriptor is first needed.",
    situations=["a library the plugin needs is missing or broken", "the descriptor names a class that was moved"],
    solutions=["follow the reason given", "reinstall the plugin's distribution", "report it to its author"],
)

# --- M: metadata ------------------------------------------------------------------------------------------------------

_add(
    "EPLB-M001",
    "Tensor {key} cannot be registered: {problem}.",
    meaning="The memory layout of an expert weight does not allow its rows to be moved as bytes.",
    when="When the Communicator is built, on the rank that holds the tensor. The others get EPLB-M006 when they meet.",
    situations=[
        "a strided view, or an expanded tensor with stride 0",
        "the expert axis is not the slowest in memory",
        "two tensors of different layers share memory",
    ],
    solutions=["register a dense tensor with the expert axis slowest, e.g. t.contiguous() before the model is built"],
)
_add(
    "EPLB-M002",
    "{label} EPLB metadata key mismatch with rank {peer}: local={local}, peer={remote}",
    meaning="Two ranks registered different sets of (layer, tensor).",
    when="When the members meet, before any byte moves, on every rank.",
    situations=["ranks loaded different models or quantisations", "tensor_names differ between ranks"],
    solutions=["register the same tensors in the same order on every rank"],
)
_add(
    "EPLB-M003",
    "{label} EPLB nbytes_per_expert mismatch for {key} with rank {peer}: local={local}, peer={remote}",
    meaning="Rows of one tensor have different sizes on two ranks.",
    when="When the members meet, before any byte moves, on every rank.",
    situations=["different dtype or quantisation between ranks", "a tensor-parallel shard of another width"],
    solutions=["make shapes and dtypes of the experts equal on all ranks"],
)
_add(
    "EPLB-M004",
    "{label} EPLB {field} mismatch with rank {peer}: local={local}, peer={remote}",
    meaning="Two ranks differ in something that must be equal before bytes may move.",
    when="When the members meet, before any byte moves, on every rank.",
    situations=[
        "different plugin or core versions on two nodes",
        "ranks chose different backends because a library is missing on one node",
        "dtype, stride, shared options or membership differ",
    ],
    solutions=[
        "install the same versions everywhere",
        "name the communicator in the configuration",
        "compare 'eplb backends' on both nodes",
    ],
)
_add(
    "EPLB-M005",
    "Refused a message from rank {peer}: {problem}.",
    meaning="A control message was damaged, truncated, stale or written by another rank. Nothing in it was used.",
    when="Whenever a message of another rank is read, from the store or by a backend.",
    situations=["two jobs share a store and a communicator name", "a proxy or a bug altered the bytes"],
    solutions=["give each job a store, or a prefix, of its own", "give each communicator of a process its own name"],
)
_add(
    "EPLB-M006",
    "Rank {rank} could not take part: {reason}",
    meaning="A rank could not be built or could not connect, and gave its reason.",
    when="When the members meet, on every other rank.",
    situations=["that rank's tensors were refused (EPLB-M001)", "its backend could not be built"],
    solutions=[
        "on that rank, correct what the reason names",
        "then build the communicator again on that rank, and call rebuild() on the others",
    ],
)

_add(
    "EPLB-M007",
    "Tensor {key} of rank {rank} has other memory than was registered: {problem}.",
    meaning="The host gave a registered tensor new memory. Rows would be read from and written to memory that the "
    "model no longer uses.",
    when="In begin() and rearrange(), on every rank, before a byte moves.",
    situations=[
        "a reload or an offload of the weights assigned tensor.data or called set_()",
        "a sleep mode resized the storage to 0 bytes",
    ],
    solutions=[
        "copy new values into the registered tensors (copy_), then call reloaded(map) on every rank",
        "or close the communicator before the memory changes, and build it again afterwards",
    ],
)

# --- P: plan ----------------------------------------------------------------------------------------------------------

_add(
    "EPLB-P001",
    "Invalid physical_to_logical_map: {problem}.",
    meaning="A map has the wrong shape, type or values.",
    when="In begin() and rearrange(), on every rank, before any byte moves. In reloaded() and in the functions of "
    "eplb_core.balancing, locally.",
    situations=[
        "fewer layers than were registered",
        "a number of columns other than world size times local physical experts",
        "ids below -1",
    ],
    solutions=["pass integer arrays [num_moe_layers, num_physical_experts] with -1 for empty slots"],
)
_add(
    "EPLB-P002",
    "Layer {layer}: expert {expert} is needed by rank {rank} and held by none.",
    meaning="The new map asks for a logical expert that no rank holds in the old map.",
    when="In begin() and rearrange(), on every rank, before any byte moves.",
    situations=[
        "old and new map were swapped",
        "the old map is not what the ranks hold",
        "a dead rank held the last replica",
    ],
    solutions=[
        "pass report.physical_to_logical_map of the last report as old_map",
        "load the expert into a row first, and call reloaded(map) on every rank",
    ],
)
_add(
    "EPLB-P003",
    "Ranks were given different {what}.",
    meaning="Maps of this rearrangement differ between ranks. Moving rows by them would corrupt weights.",
    when="In begin() and rearrange(), on every rank, before any byte moves. The communicator stays usable.",
    situations=["the policy ran on different statistics on each rank"],
    solutions=["compute the map on one rank and broadcast it", "reduce the statistics over all ranks first"],
)
_add(
    "EPLB-P004",
    "Invalid order of calls: {problem}.",
    meaning="begin, stage, commit and end were called in an order the protocol does not allow.",
    when="At the call, locally.",
    situations=[
        "stage() of a layer that is not next",
        "commit() of a layer that was not staged",
        "begin() while another rearrangement is open",
        "a call from inside another one, as a signal handler makes",
    ],
    solutions=["stage the rearrangement's layers in order, commit each, then call end()"],
)
_add(
    "EPLB-P005",
    "Layer {layer}: the plan needs rank {rank}, which is not a member.",
    meaning="After a rebuild without some ranks, a map still puts experts on one of them or reads from it.",
    when="In begin() and rearrange(), on every rank, before any byte moves.",
    situations=["the policy was not told that a rank was lost"],
    solutions=[
        "put -1 into the columns of the absent rank in the new map",
        "or rebuild() with that rank among the members",
    ],
)
_add(
    "EPLB-P006",
    "No placement can be made: {problem}.",
    meaning="The load or the sizes given to a function of eplb_core.balancing do not fit each other.",
    when="In rebalance_experts(), balancedness() and align(), on the rank that calls them.",
    situations=["the number of physical experts is no multiple of the ranks", "a load holds NaN or negative counts"],
    solutions=["correct the argument that the message names"],
)

_add(
    "EPLB-P007",
    "A plan cannot be made: {problem}.",
    meaning="An argument of a planning function does not fit the maps or the group: members, nodes, a layer, a rank or "
    "a limit.",
    when="In the functions of eplb_core.plan, before any byte moves.",
    situations=[
        "a topology with an entry too few or too many",
        "a member that is not a rank of the group",
        "a limit of zero",
    ],
    solutions=["correct the argument that the message names", "give one node for each rank, absent ranks included"],
)

_add(
    "EPLB-P008",
    "The old map is not what rank {rank} holds: it differs first in layer {layer}, at slot {slot} "
    "(held {held}, given {given}).",
    meaning="After the first rearrangement the communicator knows which expert every row holds. A plan made from "
    "another old map would read wrong rows.",
    when="In begin() and rearrange(), on every rank, before a byte moves.",
    situations=[
        "the same call was repeated after some layers were committed and a later one failed",
        "the host reloaded the weights and did not call reloaded()",
        "the map was kept from before a rebuild",
    ],
    solutions=[
        "pass report.physical_to_logical_map, from the error or the communicator, as the old map",
        "call reloaded(map) on every rank after rewriting the weights",
    ],
)

_add(
    "EPLB-P010",
    "Invalid expert load: {problem}.",
    meaning="What was recorded of a layer's tokens has the wrong shape or type, or cannot be a number of tokens.",
    when="In LoadBalancer.record(), locally; for values, when a rearrangement reads them, on every rank.",
    situations=[
        "counts of logical experts, or of this rank's own slots, where one per physical expert of all ranks is meant",
        "NaN from a kernel that did not run",
        "counts of one layer on the host and of another on a device",
    ],
    solutions=["record tokens per physical expert, [num_physical_experts], always from the same device"],
)

# --- T: transfer ------------------------------------------------------------------------------------------------------

_add(
    "EPLB-T001",
    "{label} transfer failed with state={state}",
    meaning="The backend's library reported a failure of a transfer.",
    when="In wait, on the rank that saw it; every rank aborts the layer with it.",
    situations=["a peer died", "a link or a NIC failed", "memory was unregistered under the transfer"],
    solutions=[
        "look for the first error in the log of the rank that the message names",
        "rebuild() and go on",
        "run 'eplb backends --probe'",
    ],
)
_add(
    "EPLB-T002",
    "Stalled for {seconds:.1f} s in {where}, waiting for {waiting_for}.",
    meaning="A wait ran out of time: a peer is stopped, hung, or did not make the same call.",
    when="In any wait, after timeout_s. In a rearrangement every live rank raises the same text; when the members "
    "meet, each rank has a limit of its own.",
    situations=[
        "a rank is stopped or swapped out",
        "while connecting: a name server does not answer; torch looks up each address, which takes 5 s each time",
        "ranks did not all call rearrange",
        "timeout_s is too short for this link",
    ],
    solutions=[
        "look at the rank that is named first",
        "py-spy dump its process",
        "while connecting: let /etc/hosts answer for the addresses, or try RES_OPTIONS=attempts:0 in the environment",
        "raise timeout_s if the transfer was making progress",
    ],
)
_add(
    "EPLB-T003",
    "Rank {rank} is gone ({where}).",
    meaning="The process of a rank ended: its connections of the ring closed without a goodbye.",
    when="In any wait, within seconds, on every other rank.",
    situations=[
        "the OOM killer or an operator killed it",
        "it crashed",
        "its communicator was dropped without close()",
    ],
    solutions=[
        "read the log of that rank",
        "call rebuild(timeout_s, ranks=...) with the ranks that are left, on all of them",
    ],
)
_add(
    "EPLB-T004",
    "Communicator {name!r} is unusable since {where}: {reason}",
    meaning="The communicator is poisoned by an earlier failure, which the message quotes. Nothing moves until "
    "rebuild().",
    when="At every use after the failure, at once.",
    situations=["a rank died or stalled", "the store was lost", "connecting failed", "a call was interrupted (Ctrl-C)"],
    solutions=[
        "call rebuild(timeout_s, ranks=...) on all ranks that are left",
        "or close(force=True) and build a new communicator",
    ],
)
_add(
    "EPLB-T005",
    "The store is lost in {where}: {problem}. Layers in doubt: {layers}.",
    meaning="The store does not answer, so the outcome of the layers in doubt is not known on this rank.",
    when="At any store operation, and when a connection to the store is opened: at once if the process that hosts the "
    "store is gone, after timeout_s if it is stopped.",
    situations=[
        "the process that hosts the store was killed, or ended before the others were done",
        "it is stopped or swapped out",
        "the network connection to it broke",
    ],
    solutions=[
        "rebuild(timeout_s, control=ControlPlane.from_store(new_store, ...), ranks=...) settles the layers in doubt"
    ],
)
_add(
    "EPLB-T006",
    "The commit of layer {layer} failed on rank {rank}: {reason}. The weights of this rank are invalid.",
    meaning="A copy into the live weights failed, so this rank's layer is partly old and partly new.",
    when="In commit(), on that rank alone; also in rebuild(), when a layer in doubt is committed. For the other ranks "
    "it is gone (EPLB-T003).",
    situations=["a device error", "the host freed or resized a registered tensor"],
    solutions=[
        "end this process, and load its weights again in a new one",
        "rebuild(timeout_s, ranks=...) on the others",
    ],
)
_add(
    "EPLB-T007",
    "Rank {rank} failed in {where}: {reason}",
    meaning="A rank could not do its part and gave its reason. The layer, or the whole call, was aborted on every "
    "rank.",
    when="On every rank, as soon as each learns of it.",
    situations=[
        "a backend, an observer or the host raised an exception",
        "a rank closed its communicator, or was interrupted (Ctrl-C), while the others went on",
    ],
    solutions=[
        "correct what the reason names",
        "rearrange again from report.physical_to_logical_map; rebuild() first where the communicator is poisoned",
    ],
)
_add(
    "EPLB-T008",
    "Communicator {name!r} is closed.",
    meaning="A call came after close().",
    when="At the call, on this rank.",
    situations=["a worker thread still uses the communicator"],
    solutions=["build a new communicator"],
)
_add(
    "EPLB-T009",
    "Rebuild refused: {problem}.",
    meaning="rebuild() cannot make the communicator usable again in this process.",
    when="In rebuild().",
    situations=[
        "as much landing memory is quarantined as the limit allows",
        "the landing= that the host gave is quarantined",
        "the weights of this rank are invalid (EPLB-T006)",
        "ranks= does not hold this rank, or control= gives it another number",
    ],
    solutions=[
        "correct ranks= or control=",
        "pass a new landing= to rebuild()",
        "otherwise restart the process",
    ],
)

_add(
    "EPLB-T010",
    "Staging memory: {problem}.",
    meaning="Landing or send buffers could not be allocated, or a backend released a block that it must not release.",
    when="When the Communicator is built or rebuilt, in register_buffers, or when a backend releases a block.",
    situations=[
        "too little host or device memory for staging_layers slots of the largest layer",
        "the limit on locked memory (ulimit -l) is too low for pinned staging",
        "a backend released a block twice",
    ],
    solutions=[
        "set staging_layers=1",
        "raise the memory limit of the process",
        "report a wrong release to the backend's author",
    ],
)

_add(
    "EPLB-T011",
    "Checksum mismatch in layer {layer}: {what}, landed on rank {dst} otherwise than rank {src} sent it.",
    meaning="The digest of a row where it landed differs from its digest at the source. No rank committed the layer.",
    when="At the vote on a layer, on every rank, with the observer Checksums.",
    situations=[
        "a faulty backend, link or memory",
        "the host wrote into a weight or a landing buffer while the layer moved",
        "an injected corruption",
    ],
    solutions=[
        "run again with another backend to see whether the backend is the cause",
        "do not write weights between begin() and commit()",
        "report it to the backend's author with the ranks, tensor and row named",
    ],
)
_add(
    "EPLB-T012",
    "The checksums of layer {layer} are incomplete: {problem}.",
    meaning="The digest of a row is missing at its source or destination, so the layer was neither verified nor "
    "committed.",
    when="At the vote on a layer, on every rank, with the observer Checksums.",
    situations=["only some ranks gave their communicator the observer", "ranks run different versions of it"],
    solutions=["give every rank of the communicator a Checksums observer, or none"],
)

_add(
    "EPLB-T013",
    "Communicator {name!r} belongs to process {pid}, which made it.",
    meaning="This process was forked from the one that made the communicator. The connections belong to the parent.",
    when="At any call in the forked process. The parent's communicator is not affected.",
    situations=["os.fork, or multiprocessing with the fork method, after the communicator was built"],
    solutions=["start processes with the spawn method", "or fork before the communicator is built"],
)
_add(
    "EPLB-T016",
    "A commit stands in a vote in which rank {rank} cast no ballot, in {where}.",
    meaning="The decision was made without this rank, so it cannot be about its rows, and it is not obeyed.",
    when="While this rank waits for a vote. Its weights are not touched.",
    situations=["another program, or another group, writes the communicator's keys"],
    solutions=["give each communicator a store, or a prefix of one, of its own", "rebuild()"],
)
_add(
    "EPLB-T015",
    "Another process is this rank already: {process} is rank {rank} of communicator {name!r} in this store.",
    meaning="Two processes act as the same rank, and only one can take part. The one that raises this has moved "
    "nothing.",
    when="When the members meet, on the process that came second, or on the first when the second took its place.",
    situations=[
        "two expert-parallel groups share one store and one name",
        "a rank was restarted while its old process still exists, stopped or hanging",
        "two communicators of one name are open in one process",
    ],
    solutions=[
        "give each group a store of its own: dist.PrefixStore(group_name, store)",
        "give each communicator of a group its own name=",
        "end the old process and call again",
    ],
)

_add(
    "EPLB-T014",
    "Rank {rank} could not reach rank {peer} at {at}: {reason}.",
    meaning="A connection of the ring, by which ranks notice deaths, could not be made.",
    when="When the members meet, once the addresses of all ranks are known; every rank raises it.",
    situations=[
        "a firewall drops or refuses connections to the peer's port, which the system chose",
        "the peer's host= is an address that this rank's network does not reach",
        "the peer's process ended meanwhile (the reason is 'refused')",
    ],
    solutions=[
        "from the rank's machine, try the address: 'nc -vz HOST PORT' while the peer listens",
        "give the peer host=, an address that all ranks reach",
        "open a range of ports between the ranks and name it with ports=(low, high); see 'Ports' in the README",
    ],
)

_add(
    "EPLB-T020",
    "Layer {layer} was to be committed in step {due}, and this rank is in step {step}.",
    meaning="This rank's engine went past the forward step at which all ranks were to commit a layer.",
    when="In LoadBalancer.step(), on the rank that is late. The others have committed the layer.",
    situations=[
        "step() is called in two threads, or was left by an exception of the host's own",
        "a communicator and a LoadBalancer of different groups were put together",
    ],
    solutions=[
        "call step() once per forward step, from one thread",
        "restart the rank: its weights are a layer behind",
    ],
)

_add(
    "EPLB-T021",
    "The rearrangement was called off: {reason}.",
    meaning="A rank does not want the rearrangement at hand any more. No layer of it is committed from here on.",
    when="In the background, on every rank; step() does not raise it, for nothing failed.",
    situations=["invalidate(), before weights are reloaded", "one rank closes its LoadBalancer before the others do"],
    solutions=["nothing to do: the next rearrangement comes at the next interval"],
)
_add(
    "EPLB-T022",
    "The load balancer's worker {problem}.",
    meaning="The thread that rearranges in the background is dead, or sits in one place for longer than any wait may.",
    when="In LoadBalancer.step(), on the rank whose worker it is; with on_failure='keep' a worker that died is logged, "
    "rebuilds with the others, and tries again. Others find it by the limits of their waits.",
    situations=["a backend's library call does not return", "an error of a kind that nobody expected"],
    solutions=[
        "look at the exception that the message names, or at the thread's stack (py-spy dump)",
        "close() the LoadBalancer and serve on with the placement that holds",
    ],
)
_add(
    "EPLB-T023",
    "Endpoint not ready after {seconds:g}s: {endpoints}.",
    meaning="Ranks that were to meet did not come to the store, or stopped in the middle of the meeting.",
    when="When the members meet: at connect, at the first rearrangement, in rebuild, successor and LoadBalancer. Each "
    "rank that waits raises it after its own limit, and names the same ranks.",
    situations=[
        "a rank's process has not been started, or died before it built its communicator",
        "a rank was given another store, or the store of another job",
        "a rank still loads its weights, and takes longer than the limit",
        "a rank was told to meet other members (the text says which)",
    ],
    solutions=[
        "look at the log of the rank that is named first; parentheses hold its address and the store's, where known",
        "from its machine, see whether the store's port can be reached",
        "connect(timeout_s=...) takes a longer limit than timeout_s for ranks that are built minutes apart",
    ],
)
_add(
    "EPLB-T024",
    "Rank {rank}: the source {source} did not supply layer {layer}, tensor {tensor}, expert {expert}: {reason}.",
    meaning="A source that said it holds an expert could not supply its bytes. The layer stays old on every rank.",
    when="In a rearrangement of which no live rank holds an expert, on every rank, in begin() or at the layer's vote.",
    situations=[
        "a file of the checkpoint is gone, truncated, or cannot be read",
        "its rows have another size than the registered ones: another dtype, or tensors in another order",
    ],
    solutions=["look at the reason", "CheckpointSource(..., tensors=tensor_names) says which tensor is which"],
)
_add(
    "EPLB-T025",
    "Communicator {name!r} is suspended.",
    meaning="Nothing is registered with the backend: the host called suspend() to free, move or reload its weights.",
    when="In every use between suspend() and resume() but close(), on this rank.",
    situations=["a LoadBalancer was not closed before its communicator was suspended", "resume() failed"],
    solutions=[
        "call resume() once the weights are there again",
        "close the LoadBalancer first, or let it adopt() later",
    ],
)

# --- B: bench and demo ------------------------------------------------------------------------------------------------

_add(
    "EPLB-B002",
    "Endpoint not ready after {0}s: {1}",
    meaning="A rank's process could not be started. The text is known from other tools; no time has passed.",
    when="In 'eplb demo' and in eplb_core.testing, while ranks are started; those already started are ended.",
    situations=["the limit of processes (ulimit -u) or the memory of this machine is used up"],
    solutions=["use fewer ranks", "raise the limit that the message names"],
)
_add(
    "EPLB-B003",
    "Configuration error: {0}",
    meaning="The options of a command do not fit each other, or do not fit this machine.",
    when="In 'eplb demo', before any rank starts.",
    situations=[
        "an unknown preset, or a checkpoint together with options of presets",
        "ranks that do not divide the experts, or more layers, experts or ranks than fit into memory",
    ],
    solutions=["change the option that the message names", "'eplb demo --help' lists them with their defaults"],
)
_add(
    "EPLB-B004",
    "IO error: {0}",
    meaning="A file of a checkpoint or a trace could not be read or written.",
    when="While 'eplb demo' reads a checkpoint, in ChromeTrace.write and in merge_traces.",
    situations=["a folder or file is missing", "the permission is missing"],
    solutions=["check the path that the message names"],
)
_add(
    "EPLB-B005",
    "JSON error: {0}",
    meaning="A file that should hold JSON holds none, or holds other data than expected.",
    when="While 'eplb demo' reads a checkpoint, and in merge_traces.",
    situations=["a truncated trace", "a truncated config.json or index of a checkpoint"],
    solutions=["write the file again"],
)
_add(
    "EPLB-B006",
    "Verification failed: {0} of {1} rows on rank {2} hold wrong bytes.",
    meaning="After a rearrangement, rows do not hold the logical experts that the placement puts there.",
    when="In 'eplb demo', after a rearrangement that reported success, on the ranks that hold such rows.",
    situations=["a faulty backend", "a checkpoint that changed while the demo ran", "faulty memory"],
    solutions=[
        "run again with another --backend to see whether the backend is the cause",
        "report it to the backend's author with the line that names the first row",
    ],
)
