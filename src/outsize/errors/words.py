"""Maps what other tools call things to what they are called here: a table, read where a word is unknown.

    outsize plan MODEL --gpus 8            an option of the command line
    outsize.parallelize(model, fsdp=8)     a keyword argument
    outsize.plan(..., precision="fp16")    the value of an option
    --cluster cuda                         a cluster

A row of OPTIONS has an option of outsize, a value for it, and the words of Megatron-LM, DeepSpeed,
torchtitan, torchrun, Accelerate, Lightning, transformers and plain scripts for it. Where there is no such
option, its row says what to write. A row of VALUES has an option, a value of it, and other spellings of that.
Words are compared without case, dashes and underscores.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any, Final, final


@final
@dataclass(frozen=True, slots=True)
class Spoken:
    """One thing that a user can ask for: `option=value` in Python, `--flag value` on the command line.

    `elsewhere` is what to write where the function or the command has no such option.
    """

    words: tuple[str, ...]
    option: str
    value: str
    elsewhere: str
    flag: str

    @property
    def every_word(self) -> tuple[str, ...]:
        """Returns its words; the option is one of them, unless the row is about a part of its values."""
        is_part = self.value.startswith(("outsize.", "[outsize.", "{"))
        return self.words if is_part else (*self.words, self.option)

    def in_python(self, known: Collection[str]) -> str:
        """Returns the keyword argument, or what to write instead of one."""
        return f"{self.option}={self.value}" if self.option in known else self.elsewhere

    def in_shell(self, flags: Collection[str]) -> str:
        """Returns the option of a command, or what to write instead of one."""
        name = self.flag.split()[0] if self.flag else ""
        return self.flag if name in flags else self.elsewhere


def _row(words: str, option: str, value: str, elsewhere: str, flag: str = "") -> Spoken:
    return Spoken(tuple(words.split()), option, value, elsewhere, flag)


_MESH = "outsize.parallelize(..., {}), or outsize plan MODEL --cluster 2xh100-80gb {}"
_LOOP = "a loop of your own: for x, y in loader: engine.step(x, target=y)"
_RUN = "outsize run --nproc-per-node 2 train.py"

OPTIONS: Final = (
    _row(
        "pp pp_size pp_degree pipe pipeline pipeline_parallel pipeline_parallel_size "
        "pipeline_parallel_degree pipeline_model_parallel_size num_stages n_stages pipeline_stages "
        "pipe_parallel_size splits",
        "stages", "2", _MESH.format("stages=2", "--stages 2"), "--stages 2",
    ),
    _row(
        "tp tensor_parallel tensor_parallel_size tensor_model_parallel_size tensor_parallel_degree tp_size "
        "tp_degree autotp_size mp model_parallel model_parallel_size mp_size tp_plan",
        "axes", "{'tp': 2}", _MESH.format("axes={'tp': 2}", "--axes tp=2"),
        "--axes tp=2",
    ),
    _row(
        "cp context_parallel context_parallel_size context_parallel_degree cp_size ulysses ring_attention "
        "sequence_parallel_size ulysses_sequence_parallel_size sp sp_size",
        "axes", "{'cp': 2}", _MESH.format("axes={'cp': 2}", "--axes cp=2"),
        "--axes cp=2",
    ),
    _row(
        "ep expert_parallel expert_parallel_size expert_model_parallel_size expert_parallel_degree ep_size "
        "moe",
        "axes", "{'ep': 2}", _MESH.format("axes={'ep': 2}", "--axes ep=2"),
        "--axes ep=2",
    ),
    _row(
        "dp_replicate dp ddp dp_size dp_degree data_parallel data_parallel_size "
        "data_parallel_replicate_degree replicas num_replicas no_shard",
        "axes", "{'dp_replicate': 2}", _MESH.format("axes={'dp_replicate': 2}", "--axes dp_replicate=2"),
        "--axes dp_replicate=2",
    ),
    _row(
        "dp_shard fsdp fsdp2 hsdp fully_shard full_shard sharding_strategy sharded "
        "data_parallel_shard_degree zero zero1 zero2 zero3 zero_stage zero_optimization deepspeed "
        "deepspeed_config use_deepspeed "
        "use_distributed_optimizer",
        "axes", "{'dp_shard': 2}", _MESH.format("axes={'dp_shard': 2}", "--axes dp_shard=2"),
        "--axes dp_shard=2",
    ),
    _row(
        "offload cpu_offload offload_params fsdp_offload_params offload_optimizer offload_optimizer_device "
        "offload_param_device zero_offload low_vram model_cpu_offload optimizer_cpu_offload",
        "weights", "'host'", "outsize.plan(..., weights='host'), or outsize plan MODEL --weights host",
        "--weights host",
    ),
    _row(
        "gradient_accumulation_steps gradient_accumulation grad_accum accumulate_grad_batches accum_steps "
        "accumulation_steps num_microbatches n_microbatches micro_batches num_micro_batches chunks",
        "microbatches", "4", "outsize.parallelize(..., microbatches=4)", "--microbatches 4",
    ),
    _row(
        "batch bs gbs mbs global_batch_size train_batch_size micro_batch_size per_device_train_batch_size "
        "train_micro_batch_size_per_gpu per_device_batch_size",
        "batch_size", "32", "the whole batch of all devices in the example: (model, (x,))", "--batch 32",
    ),
    _row(
        "device hardware gpu_type device_type accelerator device_map vram memory gpu_memory max_memory",
        "cluster", "'2x24GB'", "outsize.plan(..., cluster='2x24GB'), of devices by kind or memory",
        "--cluster 2x24GB",
    ),
    _row(
        "gpus gpu num_gpus n_gpus ngpus n_gpu num_devices world_size nproc nproc_per_node num_processes "
        "num_nodes nodes nnodes machines num_machines ngpus_per_node gpus_per_node multi_gpu gpu_ids "
        "visible_devices workers tpus ranks n np",
        "devices", "['cuda:0', 'cuda:1'] in this process, or outsize run --nproc-per-node 2 train.py",
        f"cluster='2xh100-80gb' for a plan; {_RUN} for so many processes",
        "--cluster 2xh100-80gb",
    ),
    _row(
        "amp fp16 bf16 half dtype torch_dtype mixed_precision autocast bfloat16 float16 param_dtype "
        "param_precision use_amp",
        "precision", "'bf16-mixed'",
        "outsize.parallelize(..., plan=outsize.Request(precision='bf16-mixed'))", "--precision bf16-mixed",
    ),
    _row(
        "gradient_checkpointing activation_checkpointing activation_checkpoint checkpoint_activations ac "
        "remat recompute_granularity recompute_activations use_checkpoint grad_checkpointing",
        "recompute", "'full'", "outsize.parallelize(..., plan=outsize.Request(recompute='full'))",
        "--recompute full",
    ),
    _row(
        "lr learning_rate weight_decay betas optim optimizers optimizer_cls optimizer_name optimizer_class "
        "opt momentum",
        "optimizer", "lambda parameters: torch.optim.AdamW(parameters, lr=1e-3)",
        "outsize.parallelize(..., optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-3))",
        "--optimizer adamw",
    ),
    _row(
        "scheduler lr_scheduler warmup_steps warmup",
        "", "", "torch.optim.lr_scheduler.LambdaLR(engine.optimizer, ...) and scheduler.step() on every rank",
    ),
    _row(
        "max_grad_norm gradient_clip_val gradient_clipping grad_clip clip_grad clip_grad_norm max_norm clip "
        "grad_norm_clip",
        "clip_norm", "1.0", "outsize.parallelize(..., clip_norm=1.0)",
    ),
    _row("compile torch_compile use_compile jit", "compiled", "True", "parallelize(..., compiled=True)"),
    _row("cuda_graphs cuda_graph use_cuda_graph", "compiled", "outsize.Compile(device_graphs=True)",
         "parallelize(..., compiled=outsize.Compile(device_graphs=True))"),
    _row(
        "seq_len seq_length sequence_length context_length max_seq_len max_length block_size image_size "
        "img_size resolution input_shape input_size shape",
        "", "", "the example batch says it: (model, (x,)) with x of that shape", "--input 4096",
    ),
    _row(
        "labels label y targets",
        "target", "y", "engine.step(x, target=y)",
    ),
    _row(
        "criterion loss loss_function loss_func loss_fun objective_fn",
        "loss_fn", "torch.nn.functional.cross_entropy",
        "outsize.parallelize(..., loss_fn=torch.nn.functional.cross_entropy)",
    ),
    _row("epochs num_epochs num_train_epochs max_epochs max_steps num_steps train_iters iters", "", "",
         _LOOP, "--steps 10"),
    _row(
        "data dataset train_dataset dataloader train_dataloader train_dataloaders loader training_data "
        "num_workers",
        "", "", "a loop of your own: for x, y in engine.state.batches(loader): engine.step(x, target=y)",
    ),
    _row(
        "resume_from_checkpoint checkpoint ckpt ckpt_path checkpoint_path checkpoint_dir load_checkpoint "
        "load save_dir output_dir save_path",
        "resume", "'run'", "outsize.parallelize(..., resume='run') and engine.state.checkpoint('run', "
        "every=100)",
        "--checkpoint run",
    ),
    _row(
        "pretrained from_pretrained model_name_or_path pretrained_model_name_or_path state_dict weights_path "
        "init_checkpoint model_path",
        "weight_files", "'model.safetensors'", "outsize.parallelize(..., weight_files='model.safetensors')",
        "--weights model.safetensors",
    ),
    _row(
        "pipeline_schedule pp_schedule schedule_type pipeline_parallel_schedule virtual_stages vpp "
        "virtual_pipeline_model_parallel_size num_layers_per_virtual_pipeline_stage",
        "schedule", "'interleaved'", "outsize.parallelize(..., schedule='interleaved')",
        "--schedule interleaved",
    ),
    _row("lora peft use_lora lora_r r peft_config", "request", "outsize.Request(lora=8)",
         "peft's own get_peft_model(model, ...)", "--lora r=8"),
    _row("request", "plan", "outsize.Request(stages=2)",
         "outsize.plan(..., request=outsize.Request(stages=2))"),
    _row("timeout nccl_timeout ddp_timeout dist_timeout", "callbacks", "[outsize.Watch(hang_timeout=60)]",
         "outsize run --watch hang_timeout=60 train.py", "--watch hang_timeout=60"),
    _row("random_seed manual_seed rng_seed", "seed", "0", "torch.manual_seed(0) before the model is built",
         "--seed 0"),
    _row("callback logger loggers report_to hooks", "callbacks", "[TensorBoard(SummaryWriter())]",
         "outsize.parallelize(..., callbacks=[...])"),
    _row("find_unused_parameters static_graph bucket_cap_mb gradient_as_bucket_view no_sync", "", "",
         "leave it out: unused weights, overlap and accumulation need no option"),
    _row("sync_batchnorm syncbn sync_bn", "request", "outsize.Request(bn='sync')",
         "outsize.parallelize(..., plan=outsize.Request(bn='sync'))", "--bn sync"),
    _row("strategy trainer plugins launcher", "", "",
         "axes={'dp_shard': 2} (FSDP), axes={'tp': 2}, stages=2, or none of them: the plan chooses"),
    _row("output out_file save o output_file", "", "", "plan.save('plan.json')", "--out plan.json"),
    _row("node_rank machine_rank", "", "", "outsize run --nnodes 2 --node-rank 0 train.py", "--node-rank 0"),
    _row("master_address main_process_ip host", "", "", "outsize run --master-addr HOST train.py",
         "--master-addr HOST"),
    _row("port main_process_port rdzv_port", "", "", "outsize run --master-port 29500 train.py",
         "--master-port 29500"),
    _row("tolerance tol atol rtol eps", "", "",
         "leave it out: bits are compared, and verdict.loss_diff and the like say how far apart they are"),
    _row("model model_name model_name_or_id", "", "",
         "outsize plan MODEL, without a flag: torchvision:resnet50, or module:builder"),
    _row("config config_file config_path yaml hostfile", "", "",
         "the options of outsize plan --help; its --out plan.json is the file that a run reads"),
    _row("quantize quantization load_in_4bit load_in_8bit bnb_config quantization_config", "request",
         "outsize.Request(quantize='nf4')",
         "quantize the model in memory (bitsandbytes, torchao) before it is planned: its bytes are counted",
         "--quantize nf4"),
    _row("flash_attention flash_attn attn_implementation use_flash_attention sdpa", "", "",
         "the model's own setting: attn_implementation='sdpa' in its config"),
    _row("format output_format", "", "", "plan.to_json()", "--json"),
    _row("verbose quiet debug log_level", "", "", "leave it out: results are on stdout, notes on stderr"),
    _row("dry_run explain", "", "", "outsize plan MODEL, which runs nothing"),
)  # fmt: skip
"""Lists what can be asked for; a word is in one row at most."""

VALUES: Final = (
    ("precision", "fp32", "float32 float torchfloat32 32 32true full single no"),
    ("precision", "bf16", "bfloat16 torchbfloat16 bf16true purebf16 brainfloat"),
    ("precision", "bf16-mixed", "mixed amp autocast bf16autocast bf16amp true"),
    ("precision", "fp16-mixed", "fp16 float16 half torchfloat16 16 16mixed fp16autocast 16true"),
    ("precision", "tf32", "tfloat32 tensorfloat32 high allowtf32"),
    ("precision", "fp16-fp16acc", "fp16acc float16fp16acc fp16accumulation allowfp16accumulation"),
    (
        "precision",
        "fp8",
        "float8 e4m3 torchfloat8e4m3fn transformerengine te fp8mixed int8 8bit",
    ),
    ("precision", "fp8-block", "fp8blockwise blockwise float8block fp8blockscaling float8blockscaling"),
    ("precision", "mxfp8", "mx mxfp8blockscaling microscaling"),
    ("precision", "nvfp4", "float4 e2m1 nvfp4blockscaling 4bit"),
    ("schedule", "1f1b", "schedule1f1b onefoneb pipedream pipedreamflush 1f1bflush"),
    ("schedule", "gpipe", "schedulegpipe filldrain afab"),
    (
        "schedule",
        "interleaved",
        "interleaved1f1b scheduleinterleaved1f1b virtual vpp loopedbfs scheduleloopedbfs",
    ),
    ("schedule", "zero-bubble", "zb zb1 zb1p zbh1 zbh2 zerobubble scheduleinterleavedzerobubble"),
    ("schedule", "zero-bubble-v", "zbv zerobubblev schedulezbvzerobubble zbvschedule"),
    ("schedule", "dualpipe-v", "dualpipe dualpipev scheduledualpipev dual-pipe-v"),
    ("schedule", "1f1b-overlap", "overlapfb overlap 1f1boverlap overlapped"),
    ("schedule", "naive", "none sequential no modelparallel"),
    ("recompute", "full", "true yes 1 all on block uniform checkpoint checkpointing"),
    ("recompute", "none", "false no 0 off"),
    ("recompute", "selective", "auto some attention coreattn"),
    ("recompute", "offload", "cpu host"),
    ("weights", "host", "cpu offload cpuoffload ram"),
    ("weights", "host-optimizer", "optimizer offloadoptimizer zerooffload cpuoptimizer"),
    ("weights", "sharded", "fsdp zero3 fullshard shard zero"),
    ("weights", "resident", "gpu device none no"),
    ("bn", "sync", "syncbn syncbatchnorm synchronized global"),
    ("bn", "micro", "local default none"),
    ("axes", "all", "true auto any tp dp fsdp"),
    ("axes", "pp", "false none pipeline"),
    ("optimizer", "adamw", "torchoptimadamw adamwtorch adamwtorchfused fusedadamw"),
    ("optimizer", "adam", "torchoptimadam fusedadam"),
    ("optimizer", "sgd", "torchoptimsgd"),
    ("optimizer", "adam8bit", "adamw8bit pagedadamw8bit bnb bitsandbytes adamwbnb8bit"),
    ("optimizer", "adafactor", "torchoptimadafactor t5"),
    ("optimizer", "momentum", "sgdmomentum nesterov rmsprop lion signum"),
    ("counting", "auto", "mean average true"),
    ("counting", "samples", "sample batch"),
    ("counting", "sum", "none tokens"),
    ("cluster", "local", "cuda gpu gpus mps xpu tpu auto here this thismachine localhost nvidia"),
)


def _key(word: Any) -> str:
    """Returns a word without case, dashes and underscores: `torch.bfloat16` -> `torchbfloat16`."""
    text = getattr(word, "__name__", None) or str(word)
    return re.sub(r"[^a-z0-9]", "", text.lower())


def _values() -> Iterator[tuple[tuple[str, str], str]]:
    for option, value, words in VALUES:
        yield from (((option, word), value) for word in (*words.split(), _key(value)))


# An option of several rows is that of the first one.
_BY_WORD: Final = {_key(word): row for row in OPTIONS[::-1] for word in row.every_word if word}
_BY_VALUE: Final = dict(_values())


def spoken(word: str) -> Spoken | None:
    """Returns the row of an option that other tools call so; None for a word of no tool."""
    return _BY_WORD.get(_key(word))


def value_here(option: str, value: object) -> str | None:
    """Returns the value of an option of outsize that other tools spell so; None where there is none."""
    return _BY_VALUE.get((option, _key(value)))


def nearest(word: str, known: Iterable[str]) -> str | None:
    """Returns the known word that one or two letters more or less would be."""
    by_key = {_key(name): name for name in known}
    near = get_close_matches(_key(word), by_key, n=1, cutoff=0.75)
    return by_key[near[0]] if near else None
