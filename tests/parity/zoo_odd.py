"""The zoo: hand-written models, odd on purpose.

Their classes are in the files zoo_odd_*.py, by what is odd about them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
import zoo_odd_control as control
import zoo_odd_forms as forms
import zoo_odd_gradients as gradients
import zoo_odd_images as pictures
import zoo_odd_python as python
import zoo_odd_sequences as sequences
import zoo_odd_signals as signals
from torch import Tensor
from zoo_case import (
    CLASSES,
    VOCABULARY,
    Batch,
    Case,
    classes,
    cross_entropy,
    features,
    images,
    label_map,
    squared_error,
    tokens,
)

# -- batches: n -> (args, kwargs) ------------------------------------------------------------------


def drawn(*shape: int, seed: int = 11) -> Callable[[int], Tensor]:
    """Normal numbers [n, *shape]."""
    return lambda n: torch.randn(n, *shape, generator=torch.Generator().manual_seed(seed))


def integers(high: int, *shape: int, seed: int = 12) -> Callable[[int], Tensor]:
    """Integers below `high`, [n, *shape]."""
    return lambda n: torch.randint(0, high, (n, *shape), generator=torch.Generator().manual_seed(seed))


def batch(*makers: Callable[[int], Any], **named: Callable[[int], Any]) -> Callable[[int], Batch]:
    """A batch of what the makers make of n."""
    return lambda n: (tuple(make(n) for make in makers), {name: make(n) for name, make in named.items()})


def plain(n: int) -> Tensor:
    return features(n, 12)


def padded(n: int) -> Tensor:
    """Token ids whose tails are zero, of several lengths."""
    ids = tokens(n)
    return ids.masked_fill(torch.arange(ids.shape[1]) >= lengths(n)[:, None], 0)


def lengths(n: int) -> Tensor:
    return 16 - torch.arange(n) % 5


def pixels(size: int) -> Callable[[int], Tensor]:
    return lambda n: images(n, size)


WORDS, FEATURES, SMALL, LARGE = batch(tokens), batch(plain), batch(pixels(16)), batch(pixels(32))
PADDED = batch(padded)


# -- losses of outputs that are not one tensor of scores --------------------------------------------


def per_token(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output.flatten(0, 1), target.flatten())


def of_log(output: Tensor, target: Tensor) -> Tensor:
    return F.nll_loss(output.flatten(0, 1), target.flatten())


def with_extra(output: tuple[Tensor, Tensor], target: Tensor) -> Tensor:
    """Scores and a further loss, or something to keep small."""
    return F.cross_entropy(output[0], target) + 0.1 * output[1].square().mean()


def deeply(output: list[Tensor], target: Tensor) -> Tensor:
    fine, coarse = output[1], F.interpolate(output[0], scale_factor=2)
    return F.cross_entropy(fine, target) + 0.5 * F.cross_entropy(coarse, target)


def evidence(output: tuple[Tensor, Tensor, Tensor], target: Tensor) -> Tensor:
    again, mean, log_variance = output
    return F.mse_loss(again, target) - 0.05 * (1 + log_variance - mean**2 - log_variance.exp()).mean()


def margin(output: Tensor, target: Tensor) -> Tensor:
    return F.multi_margin_loss(output, target)


def energy_and_forces(output: tuple[Tensor, Tensor], target: Tensor) -> Tensor:
    return output[0].square().mean() + F.mse_loss(output[1], target)


def two_domains(output: tuple[Tensor, Tensor], target: Tensor) -> Tensor:
    return F.cross_entropy(output[0], target) + F.cross_entropy(output[1], target % 2)


def named_scores(output: Any, target: Tensor) -> Tensor:
    return F.cross_entropy(output.scores, target)


def nested(output: dict[str, Any], target: Tensor) -> Tensor:
    a, (b, (both, _)) = output["pair"]
    return (
        F.cross_entropy(a, target) + F.cross_entropy(b, target) + both.abs().mean() + output["input"].mean()
    )


def tasks(output: dict[str, Tensor], target: Tensor) -> Tensor:
    return F.cross_entropy(output["classify"], target) + F.mse_loss(output["regress"][:, 0], target.float())


def both_ways(output: tuple[Tensor, Tensor], target: Tensor) -> Tensor:
    own = torch.arange(len(target))
    return (F.cross_entropy(output[0], own) + F.cross_entropy(output[1], own)) / 2


def scores(name: str, make: Any, made: Callable[[int], Batch], at_least: int = 1) -> Case:
    """A classifier under cross-entropy."""
    return Case(name, make, made, cross_entropy, classes, at_least)


def inside(name: str, make: Any, made: Callable[[int], Batch], at_least: int = 1) -> Case:
    """A model that returns its loss."""
    return Case(name, make, made, smallest_microbatch=at_least)


SEQUENCES = (
    scores("packed_gru", sequences.PackedGRU, batch(padded, lengths), 3),
    scores("cell_loop", sequences.CellLoop, WORDS),
    scores("stacked_rnn", sequences.StackedRNN, batch(drawn(10, 3))),
    Case(
        "translator",
        sequences.Translator,
        batch(padded, integers(VOCABULARY, 12)),
        per_token,
        integers(VOCABULARY, 12),
        2,
    ),
    scores("masked_encoder", sequences.MaskedEncoder, PADDED, 2),
    Case("shared_layers", sequences.SharedLayers, WORDS, per_token, tokens),
    scores("fourier_mixing", sequences.FourierMixing, WORDS),
    Case(
        "pointer_network",
        sequences.PointerNetwork,
        batch(tokens, integers(VOCABULARY, 6)),
        of_log,
        integers(VOCABULARY, 6),
        2,
    ),
    inside("speech_ctc", sequences.SpeechCTC, batch(drawn(8, 24), lambda n: 1 + integers(11, 7)(n)), 2),
    scores("bag_of_words", sequences.BagOfWords, WORDS),
    Case("relative_attention", sequences.RelativeAttention, WORDS, per_token, tokens),
    inside("crf", sequences.ConditionalRandomField, batch(tokens, integers(CLASSES, 16)), 2),
    scores("selective_scan", sequences.SelectiveScan, WORDS),
    scores("tree_network", sequences.TreeNetwork, batch(tokens, lambda n: ((0, (1, 2)), ((3, 4), 5)))),
    scores("memory_network", sequences.MemoryNetwork, WORDS),
    inside("rare_words", sequences.RareWords, WORDS, 2),
    Case("latent_array", sequences.LatentArray, PADDED, with_extra, classes),
)

PICTURES = (
    Case(
        "diffusion_unet", pictures.DiffusionUNet, batch(pixels(16), integers(1000)), squared_error, pixels(16)
    ),
    Case("attention_unet", pictures.AttentionUNet, SMALL, deeply, lambda n: label_map(n, 16)),
    scores("mlp_mixer", pictures.MLPMixer, LARGE),
    inside("pixel_cnn", pictures.PixelCNN, SMALL),
    inside("vq_vae", pictures.VQVAE, SMALL),
    Case("vae", pictures.VAE, FEATURES, evidence, plain),
    Case("tied_autoencoder", pictures.TiedAutoencoder, FEATURES, squared_error, plain),
    scores("norm_zoo", signals.NormZoo, SMALL),
    Case("fourier_operator", signals.FourierOperator, SMALL, squared_error, drawn(1, 16, 16)),
    Case("capsules", signals.Capsules, LARGE, margin, classes),
    scores("spatial_transformer", signals.SpatialTransformer, SMALL),
    scores("dense_concat", signals.DenseConcat, SMALL),
    inside("coupling_flow", signals.CouplingFlow, FEATURES),
    Case(
        "radiance_field",
        signals.RadianceField,
        batch(drawn(3), drawn(3, seed=13)),
        squared_error,
        drawn(3),
        4,
    ),
)

CONTROL = (
    Case("mixture_of_experts", control.MixtureOfExperts, FEATURES, with_extra, classes, 6),
    scores("inner_branch", control.InnerBranch, FEATURES),
    scores("root_branch", control.RootBranch, FEATURES),
    Case("adaptive_depth", control.AdaptiveDepth, FEATURES, with_extra, classes, 2),
    scores("python_stochastic_depth", control.PythonStochasticDepth, FEATURES, 4),
    scores("root_layer_drop", control.RootLayerDrop, FEATURES),
    scores("noisy_student", control.NoisyStudent, FEATURES, 4),
    scores("ode_block", gradients.ODEBlock, FEATURES),
    scores("equilibrium", gradients.Equilibrium, FEATURES),
    scores("hypernetwork", gradients.Hypernetwork, FEATURES),
    Case("vmap_ensemble", gradients.VmapEnsemble, FEATURES, with_extra, classes),
    scores("inner_gradient", gradients.InnerGradient, FEATURES),
    Case("energy_model", gradients.EnergyModel, batch(drawn(6, 3)), energy_and_forces, drawn(6, 3, seed=13)),
    Case("domain_adversary", gradients.DomainAdversary, FEATURES, two_domains, classes),
    scores("quantized_net", gradients.QuantizedNet, FEATURES),
    scores("checkpointed", gradients.Checkpointed, FEATURES),
    inside("distilled", control.Distilled, batch(plain, classes)),
    inside("momentum_pair", control.MomentumPair, batch(plain, drawn(12))),
    inside("queue", control.Queue, batch(plain, drawn(12))),
    scores("carried_state", control.CarriedState, FEATURES),
    scores("hooked_features", control.HookedFeatures, FEATURES),
    scores("mixed_precision", control.MixedPrecision, FEATURES),
)

FORMS = (
    Case("named_heads", forms.NamedHeads, batch(plain, with_features=lambda n: True), named_scores, classes),
    inside("dataclass_output", forms.DataclassOutput, batch(plain, classes)),
    Case("nested_output", forms.NestedOutput, FEATURES, nested, classes),
    scores(
        "optional_inputs",
        forms.OptionalInputs,
        batch(lambda n: {"text": plain(n), "image": None}, scale=lambda n: 0.5),
    ),
    Case("routed", forms.Routed, batch(x=plain, tasks=lambda n: ("classify", "regress")), tasks, classes),
    inside("triplet", forms.Triplet, batch(plain, drawn(12), drawn(12, seed=13)), 2),
    Case("contrastive", forms.Contrastive, batch(plain, drawn(12)), both_ways, classes, 3),
    scores("shared_graph", forms.SharedGraph, FEATURES),
    scores("graph_network", forms.GraphNetwork, batch(drawn(6, 4), integers(6, 9, 2)), 2),
    scores("low_rank_adapters", forms.LowRankAdapters, FEATURES),
    inside("mixture_density", forms.MixtureDensity, batch(plain, drawn())),
    scores("scripted", forms.Scripted, FEATURES),
    scores("set_matching", forms.SetMatching, batch(drawn(7, 4))),
    Case(
        "time_series", forms.TimeSeries, batch(lambda n: [drawn(8)(n), drawn(12)(n)]), squared_error, drawn(4)
    ),
)

PYTHON = (
    scores("own_objects", python.OwnObjects, FEATURES),
    scores("shared_cache", python.SharedCache, WORDS),
    scores("direct_calls", python.DirectCalls, FEATURES, 2),
    Case("annealed", python.Annealed, FEATURES, with_extra, classes),
    Case("counting_buffer", python.CountingBuffer, FEATURES, with_extra, classes),
    inside("set_prediction", python.SetPrediction, batch(plain, drawn(3, 2))),
    inside("gradient_penalty", python.GradientPenalty, FEATURES, 4),
    inside("adversarial_pair", python.AdversarialPair, batch(plain, drawn(4)), 2),
    scores("sparse_graph", python.SparseGraph, batch(drawn(6, 4))),
    Case("spectrogram", python.Spectrogram, batch(drawn(128)), squared_error, drawn(128, seed=13)),
    inside("gaussian_process", python.GaussianProcess, batch(plain, drawn()), 3),
    scores("own_generator", python.OwnGenerator, FEATURES),
    scores("careful_forward", python.CarefulForward, FEATURES),
    scores("second_try", python.SecondTry, FEATURES),
    Case("decoder_only", python.TransformerDecoderOnly, WORDS, per_token, tokens),
    scores("weight_drop", python.WeightDrop, WORDS),
)

CASES: tuple[Case, ...] = (*SEQUENCES, *PICTURES, *CONTROL, *FORMS, *PYTHON)
