"""DeepSeek-V2 and V3 (https://arxiv.org/abs/2405.04434, https://arxiv.org/abs/2412.19437): attention over latent states.

Keys and values of all heads are products of one latent state a token. Each head's query goes through its key matrix instead, and
what attention gives through its value matrix, so that the cache holds the latent state and one rotated key for all heads."""

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any, ClassVar

from maga_transformer._core import View
from maga_transformer.checkpoint import Source
from maga_transformer.models.builder import Builder, Heads, Norm, Routing
from maga_transformer.models.family import Family
from maga_transformer.models.irregular import LayerTensors
from maga_transformer.models.moe import deepseek_routing, grouped_softmax_routing, mixture
from maga_transformer.models.rope import Rope, read_rope, score_strength


class DeepseekV2(Family):
    model_type = "deepseek2"
    aliases: ClassVar[tuple[str, ...]] = ("deepseek_v2",)
    architectures: ClassVar[tuple[str, ...]] = ("DeepseekV2ForCausalLM",)
    layer_tensors = LayerTensors(keys="", value_dim="v_head_dim")
    latent = True
    defaults: ClassVar[Mapping[str, Any]] = MappingProxyType(
        {"kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}
    )
    dense_layers: ClassVar[int] = 0  # before the first that is sparse

    def layer(self, b: Builder, x: View, i: int) -> View:
        config, module = self.config, f"model.layers.{i}"
        h = b.norm(x, f"{module}.input_layernorm", self.norm)
        if self.heads.heads:  # pruned models have layers without
            x = b.add(x, self.attention(b, h, f"{module}.self_attn"))
        h = b.norm(x, f"{module}.post_attention_layernorm", self.norm)
        if i < config.integer("first_k_dense_replace", self.dense_layers, least=0):
            return b.add(x, b.gated_mlp(h, f"{module}.mlp", self.activation, width=self.intermediate))
        config.require("moe_layer_freq", 1)
        width = config.integer("moe_intermediate_size", 1407)
        x = b.add(x, mixture(b, h, f"{module}.mlp", self.routing(), width, self.activation))
        shared = config.integer("n_shared_experts", 1, least=0) * width
        return b.add(x, b.gated_mlp(h, f"{module}.mlp.shared_experts", self.activation, width=shared)) if shared else x

    def attention(self, b: Builder, x: View, module: str) -> View:
        config, heads, latent = self.config, self.heads.heads, self.config.integer("kv_lora_rank")
        nope, rotary, v_dim = (config.integer(f"{name}_head_dim") for name in ("qk_nope", "qk_rope", "v"))
        bias, inner = config.flag("attention_bias", False), Norm("rms", 1e-6)
        key = b.linear(x, f"{module}.kv_a_proj_with_mqa", width=latent + rotary, bias=bias)
        b.norm_in_place(View(key.value, 0, latent), f"{module}.kv_a_layernorm", inner, latent)
        name = "q_proj"
        if config.get("q_lora_rank") is not None:
            x = b.norm(
                b.linear(x, f"{module}.q_a_proj", width=config.integer("q_lora_rank"), bias=bias), f"{module}.q_a_layernorm", inner
            )
            name = "q_b_proj"
        q = b.linear(x, f"{module}.{name}", width=heads * (nope + rotary))
        keys, values = self.absorbed(b, module, nope, v_dim)
        q = b.head_linear(q, f"{module}.absorbed_keys", keys, heads, latent, nope)
        assert self.rope is not None
        b.rope([q, key], self.rope, latent + rotary, offset=latent)
        scale = (nope + rotary) ** -0.5 * score_strength(config)
        h = b.attention(q, key, None, self.heads, v_dim=latent, scale=scale)
        h = b.head_linear(h, f"{module}.absorbed_values", values, heads, v_dim, latent)
        return b.linear(h, f"{module}.o_proj", width=self.hidden, bias=bias)

    def absorbed(self, b: Builder, module: str, nope: int, v_dim: int) -> tuple[list[str], list[str]]:
        """Sources of each head's key matrix, (latent, nope), and value matrix, (v_dim, latent)."""
        heads, latent = self.heads.heads, self.config.integer("kv_lora_rank")
        if b.has(f"{module}.k_b_proj.weight"):  # as GGUF files have them
            keys = b.stacked(f"{module}.k_b_proj.weight", (heads, latent, nope))
            return keys, b.stacked(f"{module}.v_b_proj.weight", (heads, v_dim, latent))
        rows = nope + v_dim  # of a head
        tensor = b.matrix(f"{module}.kv_b_proj.weight", heads * rows, latent)
        begins = range(0, heads * rows, rows)
        keys = [str(Source(tensor, at, at + nope, heads * rows, as_columns=True)) for at in begins]
        return keys, [str(Source(tensor, at + nope, at + rows, heads * rows)) for at in begins]

    def routing(self) -> Routing:
        return grouped_softmax_routing(self.config, 64, 6)

    def read_rope(self) -> Rope:
        return replace(read_rope(self.config, self.config.integer("qk_rope_head_dim")), interleaved=True)

    def _heads(self) -> Heads:
        """All heads of the queries share the key, which is the latent state and a rotated part."""
        config = self.config
        heads, width = config.integer("num_attention_heads"), config.integer("kv_lora_rank") + config.integer("qk_rope_head_dim")
        if heads * width > 1 << 32:
            raise config.error("num_attention_heads", heads, f"fewer (a key has {width} elements)")
        return Heads(heads, 1, width)


class DeepseekV3(DeepseekV2):
    model_type = "deepseek3"
    aliases = ("deepseek_v3", "kimi_k2")
    architectures = ("DeepseekV3ForCausalLM",)
    defaults: ClassVar[Mapping[str, Any]] = MappingProxyType(
        {**DeepseekV2.defaults, "n_group": 8, "topk_group": 4, "routed_scaling_factor": 2.5, "moe_intermediate_size": 2048}
    )
    dense_layers = 3

    def routing(self) -> Routing:
        return deepseek_routing(self.config, 256, 8)

    def read_rope(self) -> Rope:
        return replace(super().read_rope(), interleaved=self.config.flag("rope_interleave", True))

    def embed(self, b: Builder, vocab: int | None) -> View:
        """The layers behind the last predict further tokens (multi-token prediction); they are no part of the model itself."""
        count = self.config.integer("num_nextn_predict_layers", 1, least=0)
        b.ignore_rest(rf"model\.layers\.({'|'.join(str(self.layers + i) for i in range(min(count, 8)))})\.")
        return super().embed(b, vocab)
