"""What a history is about: ranks, weights of every size and type, placements; and the bytes of every expert."""

from __future__ import annotations

import math
import random
import zlib
from dataclasses import dataclass, field
from functools import cache

import numpy as np
import numpy.typing as npt
import torch

Map = npt.NDArray[np.int64]

_DTYPES = {
    torch.uint8: 1,
    torch.int8: 1,
    torch.bool: 1,
    torch.float8_e4m3fn: 1,
    torch.float16: 2,
    torch.bfloat16: 2,
    torch.float32: 4,
    torch.int32: 4,
    torch.float64: 8,
    torch.int64: 8,
}
_LARGEST_ROW_NBYTES = 300_000
_RANK_NBYTES = 5 << 20


@dataclass(frozen=True)
class TensorSpec:
    """One tensor of a layer: ``[num_rows, *shape]``; `swapped` exchanges the two inner axes in memory."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    swapped: bool = False

    @property
    def row_nbytes(self) -> int:
        """Bytes of one expert."""
        return _DTYPES[self.dtype] * math.prod(self.shape)


@dataclass(frozen=True)
class World:
    """The fixed part of a history, from its seed.

    Parameters
    ----------
    backend : str
        Which.
    options : dict
        Of the backend.
    env : dict
        Of every rank's process.
    world_size, num_rows, num_experts : int
        Ranks, physical experts per rank, logical experts per layer.
    layers : tuple of tuple of TensorSpec
        ``[num_layers][num_tensors]``.
    timeout_s, staging_layers
        See `EPLBConfig`.
    name : str
        Of the communicator.
    """

    backend: str
    options: dict[str, object]
    env: dict[str, str]
    world_size: int
    num_rows: int
    num_experts: int
    layers: tuple[tuple[TensorSpec, ...], ...]
    timeout_s: float
    staging_layers: int
    name: str = "default"
    seed: str = field(default="", compare=False)

    @property
    def num_slots(self) -> int:
        """Physical experts of all ranks."""
        return self.world_size * self.num_rows

    def columns(self, rank: int) -> slice:
        """Return the columns of a map that are one rank's."""
        return slice(rank * self.num_rows, (rank + 1) * self.num_rows)

    def __str__(self) -> str:
        sizes = [[spec.row_nbytes for spec in layer] for layer in self.layers]
        env = {name: value for name, value in self.env.items() if name == "UCX_TLS"}
        return (
            f"{self.world_size} ranks x {self.num_rows} rows, {self.num_experts} experts, row bytes {sizes}, "
            f"timeout_s={self.timeout_s}, staging_layers={self.staging_layers}, {self.backend} {self.options} {env}"
        )


def draw_world(backend: str, seed: str) -> World:
    """Draw a world; equal seeds give equal worlds."""
    rng = random.Random(f"{seed}/world")
    world_size = rng.choice([2, 2, 3, 3, 4])
    num_rows = rng.randint(1, 5)
    options: dict[str, object] = {}
    env = {"UCX_NET_DEVICES": "lo"}
    if backend == "nixl":
        options["mode"] = rng.choice(["zero_copy", "staged"])
        if rng.random() < 0.4:
            env["UCX_TLS"] = "tcp"
    elif backend == "torch_gloo":
        options["threads"] = rng.choice([1, 1, 2])
        options["coalesce_nbytes"] = rng.choice([256 * 1024, 256 * 1024, 4096, 0])
    slots = world_size * num_rows
    return World(
        backend=backend,
        options=options,
        env=env,
        world_size=world_size,
        num_rows=num_rows,
        num_experts=rng.randint(max(2, slots * 2 // 3), slots),
        layers=_draw_layers(rng, num_rows),
        timeout_s=rng.choice([0.5, 0.75, 1.0]),
        staging_layers=rng.choice([1, 2, 2]),
        seed=seed,
    )


def _draw_layers(rng: random.Random, num_rows: int) -> tuple[tuple[TensorSpec, ...], ...]:
    num_layers = rng.randint(1, 6)
    kinds = [tuple(_draw_tensor(rng) for _ in range(rng.randint(1, 4))) for _ in range(rng.randint(1, num_layers))]
    layers, left = [], _RANK_NBYTES
    for number in range(num_layers):
        specs = kinds[min(number, len(kinds) - 1)] if rng.random() < 0.7 else rng.choice(kinds)
        nbytes = num_rows * sum(spec.row_nbytes for spec in specs)
        if nbytes > left:
            specs, nbytes = (TensorSpec(torch.uint8, (1,)),), num_rows
        left -= nbytes
        layers.append(specs)
    return tuple(layers)


def _draw_tensor(rng: random.Random) -> TensorSpec:
    dtype = rng.choice(list(_DTYPES))
    itemsize = _DTYPES[dtype]
    nbytes = math.exp(rng.uniform(0, math.log(_LARGEST_ROW_NBYTES)))
    count = max(1, int(nbytes) // itemsize)
    if count == 1:
        return TensorSpec(dtype, rng.choice([(), (1,)]))
    if rng.random() < 0.5:
        return TensorSpec(dtype, (count,))
    inner = rng.randint(1, math.isqrt(count))
    return TensorSpec(dtype, (count // inner, inner), swapped=rng.random() < 0.3)


# --- placements ------------------------------------------------------------------------------------------------------


def first_map(world: World, rng: random.Random) -> Map:
    """Draw a placement in which every logical expert is somewhere; what is left over repeats one, or is empty."""
    rows = []
    for _ in world.layers:
        spare = [rng.choice([-1, rng.randrange(world.num_experts)]) for _ in range(world.num_slots - world.num_experts)]
        slots = [*range(world.num_experts), *spare]
        rng.shuffle(slots)
        rows.append(slots)
    return np.array(rows, dtype=np.int64)


def next_map(world: World, old: Map, members: list[int], rng: random.Random) -> Map:
    """Draw a placement that members can come to from another: what the others held is lost, their slots are empty."""
    new = np.full_like(old, -1)
    slots = [slot for rank in members for slot in range(rank * world.num_rows, (rank + 1) * world.num_rows)]
    for layer in range(len(world.layers)):
        here = old[layer, slots].tolist()
        kind = rng.choices(["same", "within ranks", "swap", "all"], [2, 2, 2, 5])[0]
        if kind == "within ranks":
            rows = [here[at : at + world.num_rows] for at in range(0, len(here), world.num_rows)]
            for row in rows:
                rng.shuffle(row)
            here = [expert for row in rows for expert in row]
        elif kind == "swap" and len(here) > 1:
            one, other = rng.sample(range(len(here)), 2)
            here[one], here[other] = here[other], here[one]
        elif kind == "all":
            experts = sorted({expert for expert in here if expert >= 0})
            spare = [rng.choice([-1, *experts, *experts]) for _ in range(len(here) - len(experts))]
            here = [*experts, *spare]
            rng.shuffle(here)
        new[layer, slots] = here
    return new


# --- bytes -----------------------------------------------------------------------------------------------------------


@cache
def _noise() -> npt.NDArray[np.uint8]:
    return np.random.default_rng(20240607).integers(0, 256, (1 << 20) + _LARGEST_ROW_NBYTES, dtype=np.uint8)


def content(layer: int, tensor: int, expert: int, version: int, nbytes: int) -> npt.NDArray[np.uint8]:
    """Return the bytes of an expert: a pure function of where it belongs and of how often the weights were reloaded."""
    start = zlib.crc32(f"{layer}/{tensor}/{expert}/{version}".encode()) % (1 << 20)
    return _noise()[start : start + nbytes]


class Weights:
    """The live weights of one rank, as its host allocates them, and a second look at the same memory as bytes.

    Attributes
    ----------
    tensors : list of list of torch.Tensor
        ``[num_layers][num_tensors]``, for the communicator.
    version : int
        Of the bytes.
    """

    def __init__(self, world: World, rank: int) -> None:
        self.world, self.rank, self.version = world, rank, 0
        self._bytes: list[list[npt.NDArray[np.uint8]]] = []
        self.tensors: list[list[torch.Tensor]] = []
        for layer in world.layers:
            memory = [torch.full((world.num_rows, spec.row_nbytes), 0xA5, dtype=torch.uint8) for spec in layer]
            self._bytes.append([each.numpy() for each in memory])
            self.tensors.append([_typed(each, spec) for each, spec in zip(memory, layer, strict=True)])

    def fill(self, mapping: Map, version: int) -> None:
        """Load every row anew."""
        self.version = version
        for layer, tensor, row, expert in self._claims(mapping):
            memory = self._bytes[layer][tensor][row]
            memory[:] = content(layer, tensor, expert, version, len(memory))

    def wrong(self, mapping: Map) -> list[tuple[int, int, int, int]]:
        """Return (layer, tensor, row, expert) wherever a row is not the expert that the map names."""
        found = []
        for layer, tensor, row, expert in self._claims(mapping):
            if not self.is_expert(layer, tensor, row, expert):
                found.append((layer, tensor, row, expert))
        return found

    def is_expert(self, layer: int, tensor: int, row: int, expert: int) -> bool:
        """Does a row hold an expert? An empty slot may hold anything."""
        memory = self._bytes[layer][tensor][row]
        return expert < 0 or np.array_equal(memory, content(layer, tensor, expert, self.version, len(memory)))

    def holds(self, layer: int, tensor: int, row: int, versions: list[int]) -> str:
        """Say what a row holds, for people."""
        memory = self._bytes[layer][tensor][row]
        for version in [self.version, *versions]:
            for expert in range(self.world.num_experts):
                if np.array_equal(memory, content(layer, tensor, expert, version, len(memory))):
                    return f"expert {expert}" + (f" of version {version}" if version != self.version else "")
        begins = [
            expert
            for expert in range(self.world.num_experts)
            if len(memory) >= 16
            and np.array_equal(memory[:8], content(layer, tensor, expert, self.version, len(memory))[:8])
        ]
        if begins:
            return f"a part of expert {begins[0]}"
        if not memory.any():
            return "zeros"
        return f"no expert, {memory[:8].tobytes().hex()}..."

    def _claims(self, mapping: Map) -> list[tuple[int, int, int, int]]:
        here = mapping[:, self.world.columns(self.rank)].tolist()
        return [
            (layer, tensor, row, expert)
            for layer, experts in enumerate(here)
            for tensor in range(len(self._bytes[layer]))
            for row, expert in enumerate(experts)
            if expert >= 0
        ]


def _typed(memory: torch.Tensor, spec: TensorSpec) -> torch.Tensor:
    values = memory.view(spec.dtype)
    num_rows = len(memory)
    if spec.swapped:
        return values.view(num_rows, *reversed(spec.shape)).transpose(1, 2)
    return values.view(num_rows, *spec.shape)
