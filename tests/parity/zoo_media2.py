"""The zoo: transformers: speech and audio here; several modalities and time series on the joint shelf."""

from __future__ import annotations

from zoo_case import CLASSES, VOCABULARY, Case
from zoo_hf import WIDTHS, Config, batch, drawn, inside, integers
from zoo_media_joint import JOINT

# Three convolutions for seven. Layerdrop and the masks of SpecAugment as by default, with spans shorter than
# these 31 frames (of 640 samples).
WAVE: Config = {
    **WIDTHS,
    "vocab_size": VOCABULARY,
    "conv_dim": [16, 16, 16],
    "conv_kernel": [10, 3, 2],
    "conv_stride": [5, 2, 2],
    "num_conv_pos_embeddings": 8,
    "num_conv_pos_embedding_groups": 4,
    "mask_time_length": 2,
    "num_labels": CLASSES,
    "classifier_proj_size": 16,
}
SPOKEN = batch(input_values=drawn(640), labels=integers(VOCABULARY - 3, 6))


def heard(name: str, stem: str, **config: object) -> Case:
    """Speech to letters by CTC; `stem` is the class without "ForCTC"."""
    return inside(name, f"{stem}ForCTC", {**WAVE, **config}, SPOKEN)


SPEECH = (
    heard("wav2vec2_ctc", "Wav2Vec2"),
    heard("wav2vec2_stable_norm", "Wav2Vec2", do_stable_layer_norm=True, feat_extract_norm="layer"),
    heard("hubert", "Hubert"),
    heard("wavlm", "WavLM"),
    heard("unispeech", "UniSpeech"),
    heard("unispeech_sat", "UniSpeechSat"),
    heard("data2vec_audio", "Data2VecAudio", num_conv_pos_embeddings=2, conv_pos_kernel_size=3),
    heard("sew", "SEW", squeeze_factor=2),
    heard("sew_d", "SEWD", squeeze_factor=2, max_position_embeddings=64, position_buckets=16),
    heard("wav2vec2_conformer", "Wav2Vec2Conformer", conv_depthwise_kernel_size=7, hidden_act="gelu"),
)

CLASSIFIED = batch(input_values=drawn(640), labels=integers(CLASSES))


def sorted_by(name: str, stem: str, **config: object) -> Case:
    """Speech to one class; `stem` is the class without "ForSequenceClassification"."""
    return inside(name, f"{stem}ForSequenceClassification", {**WAVE, **config}, CLASSIFIED)


# The weighted sum reads the states of all layers, of which layerdrop leaves some out.
SORTED = (
    sorted_by("wav2vec2_classes", "Wav2Vec2"),
    sorted_by("hubert_classes", "Hubert"),
    sorted_by("wavlm_classes", "WavLM", layerdrop=0.0, use_weighted_layer_sum=True),
    sorted_by("data2vec_audio_classes", "Data2VecAudio", num_conv_pos_embeddings=2, conv_pos_kernel_size=3),
)

CASES: tuple[Case, ...] = (*SPEECH, *SORTED, *JOINT)
