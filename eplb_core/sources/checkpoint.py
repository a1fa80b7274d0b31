"""A source on disk: a safetensors checkpoint, memory-mapped, of which only the rows that are needed are read."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from eplb_core.errors import BenchError, ConfigError
from eplb_core.sources.checkpoint_files import CheckpointExperts
from eplb_core.sources.provider import ByteArray


class CheckpointSource:
    """The routed experts of a safetensors checkpoint, found by their usual names.

    Those are the names of Qwen3-MoE, DeepSeek-V3 and Mixtral, of one tensor an expert
    (``model.layers.3.mlp.experts.17.gate_proj.weight``, ``...block_sparse_moe.experts.17.w1.weight``) or of all experts
    of a layer in one (``model.layers.3.mlp.experts.down_proj``). Gate and up projection make one row, gate first.

    Parameters
    ----------
    path : str or Path
        Folder with ``model.safetensors.index.json`` and its shards, or with ``*.safetensors`` alone.
    layers : sequence of int or None
        Number in the model of each registered layer, for a stage of a pipeline; None: the MoE layers from the first on.
    tensors : sequence of str or None
        ``[num_tensors]``, what each registered tensor is in the checkpoint: the names of `tensor_names`. None: in their
        order, which is ``w13_weight``, ``w2_weight``, then scales.

    Attributes
    ----------
    tensor_names : tuple of str
        What each layer has: ``"w13_weight"``, ``"w2_weight"`` ...; of the first layer.

    Raises
    ------
    ConfigError
        There are no such experts, layers or tensors, or a file cannot be read (EPLB-C016).

    Notes
    -----
    Bytes are not converted: a checkpoint that the engine quantises, shuffles or transposes when it loads it needs a
    source of the host's own.
    """

    def __init__(
        self, path: str | Path, layers: Sequence[int] | None = None, tensors: Sequence[str] | None = None
    ) -> None:
        self._path = str(path)
        try:
            self._experts = CheckpointExperts(path)
        except BenchError as error:
            raise self._refused(str(error)) from error
        specs = self._experts.specs
        self.tensor_names = tuple(spec.name for spec in specs[0])
        place = {number: index for index, number in enumerate(self._experts.layer_numbers)}
        unknown = [number for number in layers or () if number not in place]
        if unknown:
            raise self._refused(f"layer {unknown[0]} has no experts in it; {list(place)} have")
        self._layers = list(place.values()) if layers is None else [place[number] for number in layers]
        self._tensors: dict[int, list[int]] = {}
        for index in self._layers:
            names = [spec.name for spec in specs[index]]
            missing = [name for name in tensors or () if name not in names]
            if missing:
                raise self._refused(f"it has no {missing[0]!r}, but {names}")
            self._tensors[index] = [names.index(name) for name in (names if tensors is None else tensors)]

    def __repr__(self) -> str:
        return f"CheckpointSource({self._path!r})"

    @property
    def nbytes_read(self) -> int:
        """Bytes of rows read so far."""
        return self._experts.nbytes_read

    def holds(self, layer: int, expert: int) -> bool:
        """See `SourceProvider`."""
        return 0 <= layer < len(self._layers) and 0 <= expert < self._experts.num_experts

    def read(self, layer: int, tensor: int, expert: int, out: ByteArray) -> None:
        """See `SourceProvider`; ValueError where its row has another size."""
        index = self._layers[layer]
        place = self._tensors[index]
        if tensor >= len(place):
            raise ValueError(f"it has {len(place)} tensors a layer, {self.tensor_names}")
        spec = self._experts.specs[index][place[tensor]]
        if spec.nbytes != out.size:
            raise ValueError(f"its {spec.name} has {spec.nbytes} bytes an expert where {out.size} are registered")
        self._experts.write(index, place[tensor], expert, out)

    def _refused(self, problem: str) -> ConfigError:
        return ConfigError("EPLB-C016", source=self._path, problem=problem)
