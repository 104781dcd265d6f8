"""Known checkpoints by name: their linear-attention and attention layers, and their parameters. Needs no torch."""

from __future__ import annotations

from dataclasses import dataclass, replace
from difflib import get_close_matches

from replayssm.errors import OptionError
from replayssm.spec import LayerSpec

BF16_BYTES = 2


@dataclass(frozen=True)
class Attention:
    """The attention layers of a model, and the numbers that each caches for a token.

    Either `kv_heads` heads of `head_dim` (keys and values), or an MLA `latent` (its rank and the rope dims), which all
    heads share. `index` counts the keys of a sparse-attention indexer as transformers caches them, one row a token.
    """

    layers: int
    kv_heads: int = 0
    head_dim: int = 0
    latent: int = 0
    index: int = 0

    @property
    def values_per_token(self) -> int:
        """Cached numbers of one layer and token."""
        return 2 * self.kv_heads * self.head_dim + self.latent + self.index

    def shard(self, tp: int) -> Attention:
        """What one of `tp` tensor-parallel shards holds: KV heads are divided, or repeated where there are fewer than
        shards; a latent and an indexer's key are on every shard. `OptionError` when the heads do not divide."""
        if not self.kv_heads:
            return self
        if self.kv_heads % tp and tp % self.kv_heads:
            raise OptionError(f"--tp {tp} neither divides {self.kv_heads} KV heads nor is a multiple of them")
        return replace(self, kv_heads=max(1, self.kv_heads // tp))


@dataclass(frozen=True)
class Geometry:
    """The layers of a checkpoint: `linear_layers` of one kind, and attention.

    `parameters` counts the text model, without a vision tower and without layers that only draft; None: not known.
    """

    spec: LayerSpec
    linear_layers: int
    attention: Attention
    parameters: int | None = None

    @property
    def all_layers(self) -> int:
        """Decoder layers."""
        return self.linear_layers + self.attention.layers

    @property
    def state_bytes(self) -> int:
        """fp32 state of one request, all layers."""
        return self.linear_layers * self.spec.state_array(1).nbytes

    @property
    def weight_bytes(self) -> int | None:
        """bf16 weights, or None."""
        return None if self.parameters is None else BF16_BYTES * self.parameters

    def shard(self, tp: int) -> Geometry:
        """The part of one of `tp` tensor-parallel shards, weights apart. `OptionError` when heads do not divide."""
        h, hv = self.spec.num_k_heads, self.spec.num_v_heads
        if h % tp or hv % tp:
            raise OptionError(f"--tp {tp} does not divide {h} key heads and {hv} value heads of a linear layer")
        spec = replace(self.spec, num_k_heads=h // tp, num_v_heads=hv // tp)
        return replace(self, spec=spec, attention=self.attention.shard(tp))


def _gdn(
    layers: tuple[int, int], heads: tuple[int, int], kv: tuple[int, int], parameters: int, index: int = 0
) -> Geometry:
    """Linear and all layers, key and value heads, KV heads and their dim."""
    linear, count = layers
    return Geometry(LayerSpec("gdn", *heads, 128, 128), linear, Attention(count - linear, *kv, index=index), parameters)


def _kda(
    layers: tuple[int, int],
    heads: int,
    latent: int,
    parameters: int | None,
    lower_bound: float | None = None,
    index: int = 0,
) -> Geometry:
    """Linear and all layers, heads, MLA latent with rope dims."""
    linear, count = layers
    spec = LayerSpec("kda", heads, heads, 128, 128, lower_bound=lower_bound)
    return Geometry(spec, linear, Attention(count - linear, latent=latent, index=index), parameters)


# Linear layers, heads and KV heads: config.json of each checkpoint. Parameters: counted by transformers on a model
# without storage that has that config; tests/planner counts them again.
_QWEN_27B = _gdn((48, 64), (16, 48), (4, 256), 26_895_998_464)
_QWEN_35B = _gdn((30, 40), (16, 32), (2, 256), 34_660_610_688)
GEOMETRIES: dict[str, Geometry] = {
    "Qwen3.5-0.8B": _gdn((18, 24), (16, 16), (2, 256), 752_393_024),
    "Qwen3.5-2B": _gdn((18, 24), (16, 16), (2, 256), 1_881_825_088),
    "Qwen3.5-4B": _gdn((24, 32), (16, 32), (4, 256), 4_205_751_296),
    "Qwen3.5-9B": _gdn((24, 32), (16, 32), (4, 256), 8_953_803_264),
    "Qwen3.5-27B": _QWEN_27B,
    "Qwen3.6-27B": _QWEN_27B,
    "Qwen3.8-27B": _QWEN_27B,
    "Qwen3.5-35B-A3B": _QWEN_35B,
    "Qwen3.6-35B-A3B": _QWEN_35B,
    "Qwen3-Next-80B-A3B": _gdn((36, 48), (16, 32), (2, 256), 79_674_391_296),
    "Qwen3.5-122B-A10B": _gdn((36, 48), (16, 64), (2, 256), 122_111_526_912),
    "Qwen3.5-397B-A17B": _gdn((45, 60), (16, 64), (2, 256), 396_346_350_336),
    # 51.2 of its 176.9 billion parameters are a table of n-grams, which an engine may keep outside of the GPU.
    "Qwen3.8-Flash-Next": _gdn((36, 48), (16, 48), (2, 256), 176_943_899_520, index=128),
    "OLMo-Hybrid-7B": Geometry(
        LayerSpec("gdn", 30, 30, 96, 192, beta_scale=2.0), 24, Attention(8, 30, 128), 7_430_870_688
    ),
    "Kimi-Linear-48B-A3B": _kda((20, 27), 32, 512 + 64, 49_133_074_464),
    "Ling-3.0-flash": _kda((35, 42), 32, 512 + 64, 124_414_191_072, lower_bound=-5.0),
    "GLM-5.3-Flash": _kda((34, 45), 64, 512, 313_326_816_766, lower_bound=-5.0, index=2 * 128 + 1),
    # transformers has no class for it, so that its parameters are not counted.
    "Kimi-K3": _kda((69, 93), 96, 512 + 64, None),
}


def known(name: str) -> tuple[str, Geometry] | None:
    """The name as the table spells it, and its entry; case and an 'owner/' before it do not matter. None: unknown."""
    wanted = _plain(name)
    found = next((key for key in GEOMETRIES if key.lower() == wanted), None)
    return None if found is None else (found, GEOMETRIES[found])


def nearest(name: str) -> list[str]:
    """Up to three names of the table that resemble `name`; all of them where none does."""
    names = {key.lower(): key for key in GEOMETRIES}
    return [names[key] for key in get_close_matches(_plain(name), names, n=3, cutoff=0.4)] or list(GEOMETRIES)


def _plain(name: str) -> str:
    return name.strip().lower().rpartition("/")[2]
