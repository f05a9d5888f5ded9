"""The zoo: transformers: decoders, mixtures of experts and state-space models."""

from __future__ import annotations

from typing import Any

from zoo_case import VOCABULARY, Case, causal_batch, masked_batch
from zoo_hf import inside

DECODER = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
GROUPED = {**DECODER, "num_key_value_heads": 2}


def decoder(name: str, stem: str, **config: Any) -> Case:
    """`stem` is the class without "ForCausalLM"; as many key heads as query heads."""
    return inside(name, f"{stem}ForCausalLM", {**DECODER, **config}, causal_batch)


def grouped(name: str, stem: str, **config: Any) -> Case:
    """The same with two query heads per key head."""
    return inside(name, f"{stem}ForCausalLM", {**GROUPED, **config}, causal_batch)


def padded(name: str, stem: str, **config: Any) -> Case:
    """The same with a mask: every sample ends in padding."""
    return inside(name, f"{stem}ForCausalLM", {**GROUPED, **config}, masked_batch)


DENSE = (
    decoder("gpt_neox", "GPTNeoX", hidden_dropout=0.1, attention_dropout=0.1),
    decoder("gptj", "GPTJ", n_embd=32, n_layer=3, n_head=4, rotary_dim=4),
    decoder(
        "gpt_neo", "GPTNeo", num_hidden_layers=2, attention_types=[[["global", "local"], 1]], window_size=8
    ),
    decoder("opt", "OPT", ffn_dim=64, word_embed_proj_dim=16),
    decoder("bloom", "Bloom", n_layer=3, n_head=4),
    decoder("falcon", "Falcon"),
    decoder("phi", "Phi", resid_pdrop=0.1),
    grouped("phi3", "Phi3"),
    grouped("gemma", "Gemma", head_dim=8),
    grouped("gemma2", "Gemma2", head_dim=8, sliding_window=8),
    grouped("gemma3_text", "Gemma3", head_dim=8, sliding_window=8, sliding_window_pattern=2),
    grouped("mistral", "Mistral", sliding_window=8),
    grouped("qwen2", "Qwen2", tie_word_embeddings=True),
    grouped("olmo", "Olmo", clip_qkv=4.0),
    grouped("olmo2", "Olmo2"),
    grouped("stablelm", "StableLm", qk_layernorm=True),
    grouped("starcoder2", "Starcoder2", residual_dropout=0.1),
    decoder("codegen", "CodeGen", n_embd=32, n_layer=3, n_head=4, rotary_dim=4),
    decoder("gpt_bigcode", "GPTBigCode"),
    grouped("cohere", "Cohere"),
    grouped("cohere2", "Cohere2", sliding_window=8),
    grouped("glm", "Glm", head_dim=8),
    grouped("glm4", "Glm4", head_dim=8),
    grouped("granite", "Granite"),
    grouped("nemotron", "Nemotron"),
    decoder("persimmon", "Persimmon"),
    grouped("smollm3", "SmolLM3"),
    grouped("helium", "Helium", head_dim=8),
    grouped("ernie4_5", "Ernie4_5"),
    decoder("xglm", "XGLM", d_model=32, ffn_dim=64, num_layers=3, attention_heads=4),
)

EXPERTS = {"moe_intermediate_size": 32, "num_experts": 4, "num_experts_per_tok": 2}
LATENT = {
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 8,
}
LINEAR = {
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_num_key_heads": 2,
    "num_hidden_layers": 2,
}
DBRX = {
    "vocab_size": VOCABULARY,
    "d_model": 32,
    "n_heads": 4,
    "n_layers": 2,
    "max_seq_len": 64,
    "attn_config": {"kv_n_heads": 2, "rope_theta": 1e4, "clip_qkv": 8.0},
    "ffn_config": {"hidden_size": 32, "ffn_hidden_size": 32, "moe_num_experts": 4, "moe_top_k": 2},
    "output_router_logits": True,
}

MIXTURES = (
    grouped("phimoe", "Phimoe", num_local_experts=4, output_router_logits=True),
    grouped("qwen2_moe", "Qwen2Moe", **EXPERTS, output_router_logits=True),
    grouped("qwen3_moe", "Qwen3Moe", **EXPERTS, head_dim=8, output_router_logits=True),
    grouped(
        "qwen3_next",
        "Qwen3Next",
        **EXPERTS,
        head_dim=8,
        **LINEAR,
        layer_types=["linear_attention", "full_attention"],
    ),
    grouped("olmoe", "Olmoe", num_experts=4, num_experts_per_tok=2, output_router_logits=True),
    inside("dbrx", "DbrxForCausalLM", DBRX, causal_batch),
    decoder(
        "deepseek_v2",
        "DeepseekV2",
        **LATENT,
        n_routed_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=32,
    ),
    decoder(
        "deepseek_v3",
        "DeepseekV3",
        **LATENT,
        n_routed_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=32,
        n_group=2,
        topk_group=1,
        first_k_dense_replace=1,
    ),
    grouped(
        "granitemoe", "GraniteMoe", num_local_experts=4, num_experts_per_tok=2, output_router_logits=True
    ),
    grouped("jetmoe", "JetMoe", num_local_experts=4, kv_channels=8, output_router_logits=True),
    grouped("ernie4_5_moe", "Ernie4_5_Moe", moe_num_experts=4, moe_k=2, moe_intermediate_size=32),
    grouped("gpt_oss", "GptOss", num_local_experts=4, num_experts_per_tok=2, head_dim=8, sliding_window=8),
    grouped("minimax", "MiniMax", num_local_experts=4, head_dim=8, block_size=8, output_router_logits=True),
)

MAMBA = {
    "mamba_n_heads": 8,
    "mamba_d_head": 8,
    "mamba_d_state": 8,
    "mamba_n_groups": 1,
    "mamba_chunk_size": 8,
}
ZAMBA = {"n_mamba_heads": 2, "mamba_d_state": 8, "num_key_value_heads": 4}

STATES = (
    grouped(
        "jamba",
        "Jamba",
        attn_layer_period=2,
        attn_layer_offset=1,
        expert_layer_period=2,
        num_experts=4,
        mamba_d_state=8,
        mamba_dt_rank=4,
    ),
    decoder("mamba2", "Mamba2", num_heads=8, head_dim=8, state_size=8, n_groups=2, chunk_size=8),
    decoder("falcon_mamba", "FalconMamba", state_size=8),
    grouped("recurrent_gemma", "RecurrentGemma", head_dim=8, lru_width=32, attention_window_size=8),
    decoder("rwkv", "Rwkv", attention_hidden_size=32, num_hidden_layers=2),
    grouped("bamba", "Bamba", **MAMBA, attn_layer_indices=[1]),
    grouped("lfm2", "Lfm2", layer_types=["conv", "full_attention", "conv"]),
    decoder(
        "zamba",
        "Zamba",
        **ZAMBA,
        num_hidden_layers=3,
        layers_block_type=["mamba", "hybrid", "hybrid"],
    ),
    decoder(
        "zamba2",
        "Zamba2",
        num_hidden_layers=4,
        layers_block_type=["mamba", "hybrid", "mamba", "hybrid"],
        mamba_d_state=8,
        mamba_ngroups=1,
        n_mamba_heads=8,
        chunk_size=8,
    ),
    grouped("falcon_h1", "FalconH1", **MAMBA, mamba_d_ssm=64),
    grouped(
        "granitemoehybrid",
        "GraniteMoeHybrid",
        **MAMBA,
        num_local_experts=4,
        num_experts_per_tok=2,
        layer_types=["mamba", "attention", "mamba"],
    ),
    grouped(
        "nemotron_h",
        "NemotronH",
        mamba_num_heads=8,
        mamba_head_dim=8,
        ssm_state_size=8,
        n_groups=1,
        chunk_size=8,
        head_dim=8,
    ),
)
XLNET = {"vocab_size": VOCABULARY, "d_model": 32, "n_layer": 3, "n_head": 4, "d_inner": 64}

OTHERS = (
    decoder("biogpt", "BioGpt"),
    inside("ctrl", "CTRLLMHeadModel", {**DECODER, "n_embd": 32, "dff": 64}, causal_batch),
    inside("openai_gpt", "OpenAIGPTLMHeadModel", DECODER, causal_batch),
    inside("xlnet", "XLNetLMHeadModel", XLNET, causal_batch),
    grouped("bitnet", "BitNet"),
    grouped(
        "llama4_text",
        "Llama4",
        head_dim=8,
        num_local_experts=4,
        attention_chunk_size=8,
        intermediate_size_mlp=64,
    ),
    grouped("doge", "Doge", head_dim=8),
    padded("qwen2_padded", "Qwen2"),
    padded("mistral_padded", "Mistral", sliding_window=8),
    padded("gemma3_padded", "Gemma3", head_dim=8, sliding_window=8),
    padded("opt_padded", "OPT", ffn_dim=64),
    padded("mpt_padded", "Mpt", n_layers=3, max_seq_len=64),
    padded("qwen3_moe_padded", "Qwen3Moe", **EXPERTS, head_dim=8, output_router_logits=True),
    padded("bloom_padded", "Bloom"),
)

CASES: tuple[Case, ...] = (*DENSE, *MIXTURES, *STATES, *OTHERS)
