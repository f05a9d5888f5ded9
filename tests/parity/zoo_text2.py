"""The zoo: transformers: encoders, encoder-decoders and odd attention."""

from __future__ import annotations

from typing import Any

from zoo_case import VOCABULARY, Batch, Case, causal_batch, masked_batch, seq2seq_batch
from zoo_hf import WIDTHS, inside

ENCODER = {**WIDTHS, "vocab_size": VOCABULARY, "max_position_embeddings": 64, "pad_token_id": 0}


def encoder(name: str, stem: str, **config: Any) -> Case:
    """`stem` is the class without "ForMaskedLM"; the mask hides the end of every sample."""
    return inside(name, f"{stem}ForMaskedLM", {**ENCODER, **config}, masked_batch)


FUNNEL = {
    "vocab_size": VOCABULARY,
    "block_sizes": [1, 1],
    "num_decoder_layers": 1,
    "d_model": 32,
    "n_head": 4,
}
FUNNEL |= {"d_head": 8, "d_inner": 64}
NYSTROM = {**ENCODER, "num_landmarks": 4, "segment_means_seq_len": 16}
XLM = {"n_words": VOCABULARY, "emb_dim": 32, "n_layers": 2, "n_heads": 4, "max_position_embeddings": 64}
REFORMER = {
    "is_decoder": False,
    "attention_head_size": 8,
    "attn_layers": ["local", "lsh"],
    "axial_pos_shape": [4, 4],
    "axial_pos_embds_dim": [16, 16],
    "lsh_attn_chunk_length": 4,
    "local_attn_chunk_length": 4,
    "num_buckets": 4,
    "feed_forward_size": 64,
}
CANINE = {**WIDTHS, "num_labels": VOCABULARY, "local_transformer_stride": 4, "num_hash_buckets": 64}
CANINE |= {"upsampling_kernel_size": 3, "downsampling_rate": 2, "max_position_embeddings": 64}

ENCODERS = (
    encoder("roberta", "Roberta"),
    encoder("albert", "Albert", embedding_size=16),
    encoder("electra", "Electra", embedding_size=16),
    encoder("deberta", "Deberta", relative_attention=True, pos_att_type=["c2p", "p2c"]),
    encoder("deberta_v2", "DebertaV2", relative_attention=True, pos_att_type=["c2p", "p2c"]),
    encoder("distilbert", "DistilBert", dim=32, hidden_dim=64, n_layers=2, n_heads=4),
    encoder("mobilebert", "MobileBert", embedding_size=32, intra_bottleneck_size=32, true_hidden_size=32),
    encoder("mpnet", "MPNet"),
    encoder("longformer", "Longformer", attention_window=[4, 4]),
    encoder("big_bird", "BigBird", block_size=2, num_random_blocks=1),
    encoder("fnet", "FNet"),
    inside("funnel", "FunnelForMaskedLM", FUNNEL, masked_batch),
    encoder("convbert", "ConvBert", embedding_size=16),
    encoder("squeezebert", "SqueezeBert", embedding_size=32),
    encoder("roformer", "RoFormer", embedding_size=16, rotary_value=True),
    inside("nystromformer", "NystromformerForMaskedLM", NYSTROM, causal_batch),
    encoder("yoso", "Yoso"),
    encoder("luke", "Luke", entity_vocab_size=8, entity_emb_size=8),
    encoder("modernbert", "ModernBert", local_attention=8),
    encoder("ibert", "IBert"),
    encoder("megatron_bert", "MegatronBert"),
    encoder("rembert", "RemBert", input_embedding_size=16, output_embedding_size=24),
    inside("xlm", "XLMWithLMHeadModel", XLM, masked_batch),
    encoder("reformer", "Reformer", **REFORMER),
    inside("canine", "CanineForTokenClassification", CANINE, masked_batch),
)

SIDES = {"encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4, "decoder_attention_heads": 4}
SIDES |= {"encoder_ffn_dim": 64, "decoder_ffn_dim": 64, "d_model": 32, "max_position_embeddings": 64}
SIDES |= {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}
T5 = {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4, "decoder_start_token_id": 0}
FSMT = {"langs": ["a", "b"], "src_vocab_size": VOCABULARY, "tgt_vocab_size": VOCABULARY}
PROPHET = {"vocab_size": VOCABULARY, "hidden_size": 32, "num_encoder_layers": 2, "num_decoder_layers": 2}
PROPHET |= {"num_encoder_attention_heads": 4, "num_decoder_attention_heads": 4, "decoder_start_token_id": 1}
PROPHET |= {"encoder_ffn_dim": 64, "decoder_ffn_dim": 64, "max_position_embeddings": 64}


def padded_source(batch_size: int) -> Batch:
    """Targets, and a source whose samples end in padding."""
    args, found = seq2seq_batch(batch_size)
    mask = masked_batch(batch_size)[1]["attention_mask"]
    return args, {**found, "attention_mask": mask}


def translator(name: str, stem: str, **config: Any) -> Case:
    """`stem` is the class without "ForConditionalGeneration"; two layers on each side."""
    config = {"vocab_size": VOCABULARY, **SIDES, **config}
    return inside(name, f"{stem}ForConditionalGeneration", config, padded_source)


def like_t5(name: str, stem: str, **config: Any) -> Case:
    """The same of the T5 family."""
    return inside(
        name, f"{stem}ForConditionalGeneration", {"vocab_size": VOCABULARY, **T5, **config}, padded_source
    )


PAIRS = (
    translator("mbart", "MBart"),
    translator("pegasus", "Pegasus"),
    translator("pegasus_x", "PegasusX", block_size=4, num_global_tokens=4),
    translator("blenderbot", "Blenderbot"),
    translator("blenderbot_small", "BlenderbotSmall"),
    translator("m2m_100", "M2M100"),
    translator("plbart", "PLBart"),
    inside("fsmt", "FSMTForConditionalGeneration", {**SIDES, **FSMT}, masked_batch),
    translator("led", "LED", attention_window=4),
    translator("bigbird_pegasus", "BigBirdPegasus", block_size=2, num_random_blocks=1),
    translator(
        "nllb_moe", "NllbMoe", num_experts=4, expert_capacity=16, encoder_layerdrop=0.0, decoder_layerdrop=0.0
    ),
    inside("prophetnet", "ProphetNetForConditionalGeneration", PROPHET, padded_source),
    inside("marian", "MarianMTModel", {"vocab_size": VOCABULARY, **SIDES}, padded_source),
    like_t5("mt5", "MT5"),
    like_t5("umt5", "UMT5"),
    like_t5("long_t5", "LongT5", local_radius=3),
    like_t5(
        "long_t5_global",
        "LongT5",
        encoder_attention_type="transient-global",
        local_radius=3,
        global_block_size=4,
    ),
    like_t5("switch_transformers", "SwitchTransformers", num_experts=4, expert_capacity=16),
)

CASES: tuple[Case, ...] = (*ENCODERS, *PAIRS)
