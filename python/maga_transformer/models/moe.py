"""What families with experts share: routing as their configs state it, and which layers are sparse."""

from dataclasses import replace

from maga_transformer._core import View
from maga_transformer.models.builder import Builder, Routing
from maga_transformer.models.config import ModelConfig


def softmax_routing(config: ModelConfig, experts: int, top_k: int, *, renormalise: bool) -> Routing:
    """`experts` and `top_k`: of the published models."""
    count = config.integer("num_experts", experts)
    return _checked(config, Routing(count, config.integer("num_experts_per_tok", top_k), renormalise=renormalise))


def deepseek_routing(config: ModelConfig, experts: int, top_k: int) -> Routing:
    """DeepSeek-V3 (https://arxiv.org/abs/2412.19437), section 2.1.2: sigmoid scores, corrected for the choice alone, from the best
    groups of experts."""
    groups = config.integer("n_group", 1)
    count = config.integer("n_routed_experts", experts)
    routing = Routing(
        count,
        config.integer("num_experts_per_tok", top_k),
        score="sigmoid",
        groups=groups,
        top_groups=config.integer("topk_group", 1),
        group_best=2 if groups > 1 else 1,
        renormalise=config.flag("norm_topk_prob", True),
        scale=config.number("routed_scaling_factor", 1.0),
    )
    return _checked(config, routing)


def grouped_softmax_routing(config: ModelConfig, experts: int, top_k: int) -> Routing:
    """DeepSeek-V2 (https://arxiv.org/abs/2405.04434), section 2.2.2: from the groups of experts with the best one."""
    method = config.text("topk_method", "greedy")
    if method not in ("greedy", "group_limited_greedy"):
        raise config.error("topk_method", method, "greedy or group_limited_greedy")
    config.require("norm_topk_prob", False)
    grouped = method == "group_limited_greedy"
    routing = Routing(
        config.integer("n_routed_experts", experts),
        config.integer("num_experts_per_tok", top_k),
        groups=config.integer("n_group", 1) if grouped else 1,
        top_groups=config.integer("topk_group", 1) if grouped else 1,
        scale=config.number("routed_scaling_factor", 1.0),
    )
    return _checked(config, routing)


def is_sparse(config: ModelConfig, i: int) -> bool:
    """Of layer `i`, in Qwen's models."""
    dense = config.get("mlp_only_layers") or []
    if not isinstance(dense, list):
        raise config.error("mlp_only_layers", dense, "a list of layers")
    return i not in dense and (i + 1) % config.integer("decoder_sparse_step", 1) == 0


def mixture(b: Builder, h: View, module: str, routing: Routing, width: int, activation: str) -> View:
    """Router and experts under the names that most families use."""
    logits = b.linear(h, f"{module}.gate", width=routing.experts)
    correction = f"{module}.gate.e_score_correction_bias"
    if routing.score == "sigmoid":
        routing = replace(routing, correction=correction)
    experts = b.experts(f"{module}.experts", routing.experts, width, h.width)
    return b.moe(h, logits, f"{module}.experts", experts, routing, activation)


def _checked(config: ModelConfig, routing: Routing) -> Routing:
    if not 1 <= routing.top_k <= routing.experts:
        raise config.error("num_experts_per_tok", routing.top_k, f"at most the number of experts, which is {routing.experts}")
    return routing
