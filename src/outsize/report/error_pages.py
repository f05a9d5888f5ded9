"""Holds the pages of `outsize explain E201`: what an error means, its usual causes and what to do,
offline.
"""

from __future__ import annotations

import difflib
from types import MappingProxyType

from outsize.errors import BadOption

_E101 = """
UnknownModel [E101]: no model under this name.

MODEL is one of
  torchvision:resnet50                          a name of torchvision's registry
  transformers:LlamaConfig?num_hidden_layers=4  a config class, with values
  transformers:./config.json                    a config file
  package.module:builder                        your own function or class

What to do
  Compare the spelling with the suggestion in the message. For your own model,
  give the importable name of its module, not the path of its file, and a colon
  before the function that returns the nn.Module.
"""
_E102 = """
ModelNotImportable [E102]: the module or the builder of MODEL raised.

The name was understood, but importing the module or calling the builder
failed. The message has the exception and, where it lies in your own code,
file:line.

What to do
  Run  python -c "import package.module"  in the same folder: it must succeed
  without outsize. The current folder is searched for modules as python -m does
  it. A missing torchvision or transformers comes with pip install
  'outsize[vision]'  or  pip install 'outsize[hf]'.
"""
_E103 = """
ExampleRejected [E103]: the model raises on the example batch.

outsize runs the model's own forward once on fake tensors of the example's
shapes and dtypes. The model's own error is in the message, with the call. The
real forward would fail in the same way.

Usual causes
  - --input describes a batch; it is the shape of one sample (3x224x224), and
    --batch adds the batch size
  - token ids where the model wants floats, or a sequence longer than its
    position embedding
  - a keyword argument that the forward requires and the example does not give

What to do
  Call the model in plain PyTorch with the same shapes. For a model of your
  own, define example_batch beside its builder; it returns (args, kwargs).
"""
_E104 = """
TooFewSamples [E104]: more microbatches than samples.

A microbatch holds at least one sample. A batch that does not divide is no
error: its microbatches then differ by one sample, and each weighs in the loss
by what it really holds.

What to do
  Ask for fewer --microbatches, or make --batch larger. About four
  microbatches per stage keep the bubble small.
"""
_E105 = """
UnknownDevice [E105]: a device or a cluster that outsize does not know.

A cluster is written [NODESx]COUNTxDEVICE:
  2xcpu              two processes on the CPU
  8xh100-80gb        one node with eight GPUs
  2x8xa100-80gb      two nodes of eight
  2x12GB             two devices of 12 GB, of which nothing else is known
  local              what this machine has

What to do
  The message lists the known devices. For another one, give its memory as a
  size: the split then fits, and the predicted seconds are those of an RTX
  3090. Or write its figures into a file, --cluster mine.json:
  {"devices": [
     {"kind": "mine", "memory_bytes": 68000000000, "bytes_per_s": 3.2e12,
      "flops_per_s": {"float32": 6e13, "bfloat16": 9e14, "float8": 1.8e15},
      "source": "its data sheet, without sparsity"}],
   "inner": "pcie5", "outer": "eth100"}
  A kind that is known may stand for what you leave out: {"kind": "h100-80gb",
  "memory_bytes": 68000000000}. A device in a plan file must be one of its
  cluster.
"""
_E106 = """
BadOption [E106]: an option's value makes no sense here.

The message names the option, says what would be accepted, and ends with a
value that works. Nothing was started and no file was written.

What to do
  Type the suggested value.  outsize VERB --help  lists the options of a verb
  with their defaults.
"""
_E107 = """
BadWeights [E107]: weights on disk that are missing or do not fit the model.

weight_files= takes a .safetensors file, an index (model.safetensors.index.json)
or a folder with one of the two. The names in it are those of the model's own
state_dict(); of tied weights one name is enough. Each process reads its own
tensors only, and a tensor of another dtype is copied into the model's.

Usual causes
  - a checkpoint of another class: with or without a head, or a prefix such as
    "model." before every name. The message gives the nearest names.
  - a config other than the checkpoint's: the shapes differ
  - a buffer that is not in the file and whose module cannot make it anew

What to do
  Build the very class that was saved. For a buffer on meta: build parameters
  on meta only, accelerate.init_empty_weights(include_buffers=False). docs/
  weights.md has the whole story.
"""
_E108 = """
BadCheckpoint [E108]: a checkpoint on disk that is missing, damaged, or does
not fit the run.

A checkpoint is a folder step-NNNNNNNN under the root that was given. Its
manifest.json names each file with its size, and each part of each tensor with
a checksum. Only what a manifest vouches for is read: a folder without one is a
save that did not end, and is passed over. A file that is not what the manifest
says is damage, and nothing is read in its place without a word.

Usual causes
  - a copy that broke off, or a disk that loses bits: the message names the file
  - files of two checkpoints in one folder
  - a folder that was removed by hand while the list `latest` names it

What to do
  The message ends with the next older checkpoint that is whole: resume from
  it. Copy folders as a whole, manifest.json last.
"""
_E111 = """
NotCapturable [E111]: the forward does something that cannot be cut into
stages.

outsize records what your forward does, once for each input signature. Python
control flow simply runs, but the record must be right for the next batch too.

Usual causes
  - a decision on the values of activations: if x.sum() > 0, x.item(),
    tensor[mask] with a mask that the model computes. Inside a submodule this
    works: that submodule becomes one unit, which is never cut. In the model's
    own forward it costs the overlap of stages: the model runs by modules, and
    the plan says so.
  - state kept between calls in a plain attribute instead of a registered
    buffer
  - tensors that PyTorch cannot follow: numpy, a custom C++ call, a global list

You see this error for a model without submodules, or when a module of a
model that runs by modules does what other ranks cannot follow.

What to do
  The message has file:line. Move that code into a submodule of its own, or
  register the state as a buffer. With --stages 1 the model trains uncut.
"""
_E112 = """
ReplayMismatch [E112]: the model did not repeat what it did when it was
captured.

A captured forward is valid as long as the same inputs lead through the same
calls. Here a module was called in another order, not at all, or returned
another Python value than before.

Usual causes
  - a counter or a cache in a plain attribute, which changes from call to call
  - Python's own random numbers that decide what runs (layer drop, for example)
  - a branch on self.training when train() or eval() was called in between by
    the model itself

What to do
  The message names the call and its line. Make the decision depend on the
  inputs or on registered buffers, or move it, together with what it decides,
  into one submodule.
"""
_E113 = """
UnknownPython [E113]: the instructions of this version of Python are not known.

While a forward is captured, the Python instructions of your code are followed:
each value that it reads (an attribute, a global, an item of a list) is compared
before every step, and what it writes is put back. Instructions change with each
version of Python. On one that is not known a value could change without a
notice, and a run would go on with other numbers than the plain loop; so nothing
is captured.

What to do
  Use one of the versions that the message names, as in
  `python3.13 -m venv .venv`. outsize does not need to be the newest; torch has
  wheels for all of them.
"""
_E201 = """
NoFeasiblePlan [E201]: no split of the model fits the devices.

Every schedule and every number of microbatches was tried, with the cut that
needs least on its fullest device; then, unless --exact or --axes pp forbid it,
replicas, FSDP, tensor parallelism, and one device with weights on the host.
The message names that stage of a pipeline, what it needs by cause, and the
nearest pipeline that would fit.

What takes memory
  weights       of the stage, all of the time
  gradients     as large as its trainable weights
  optimizer     twice the weights for Adam and AdamW, nothing for plain SGD
  activations   saved from forward to backward, for each microbatch in flight
  boundary      buffers for what is sent and received

What to do
  Where the message names a nearest fit, it was computed, not guessed. If
  activations dominate, use more and smaller microbatches, and 1f1b instead of
  gpipe: it keeps no more microbatches in flight than there are stages. If
  weights and optimizer dominate, use more stages, larger devices, or an
  optimizer with less state.
"""
_E202 = """
TooManyStages [E202]: more stages than the model has units.

A unit is the smallest piece that a stage can be made of: one leaf module with
the operations around it. Code that cannot be cut, such as a module that
decides on its activations, is one unit.

What to do
  Ask for as many stages as the message says, or fewer.  outsize plan MODEL
  --units  lists the units in order.
"""
_E203 = """
ModelMismatch [E203]: the plan, or the profile, is of another model.

A plan has the fingerprint of the model it was made for: its class, the names,
shapes and dtypes of its parameters, and its units. It does not change with the
weights, the batch size, the device or the machine.

Usual causes
  - another number of layers, another hidden size or another dtype
  - an input for which the model calls other modules than for the plan's input
  - another version of the library that the model is from, with other modules
    inside

What to do
  Make the plan again with this model and this input. Plans are small and
  quickly made.
"""
_E204 = """
WorldMismatch [E204]: the plan needs another number of processes than were
started, or they were not started in the same way.

One process runs one stage, for each replica and tensor parallel part: a plan
with pp 3 and dp_replicate 2 needs --nproc-per-node 6 on one machine, or as many
processes on all machines together. Before they begin, all ranks compare plan,
model and the versions of outsize and torch; the message names a rank that has
another.

What to do
  Start as many processes as the message says, or plan for the devices you
  have: outsize plan MODEL --stages 2 --out plan.json. Give every rank the
  same plan file, and install the same versions on all machines.
"""
_E205 = """
BadPlan [E205]: the plan file cannot be read, or it contradicts itself.

A plan may be edited by hand. It is checked before anything runs:
  - it is JSON with the known fields and no others; the message names the field
  - each stage has units, written as patterns: "transformer.h.0-3" stands for
    four blocks and all below them
  - all units of the model appear in exactly one stage, in the model's order

What to do
  outsize plan MODEL --units  lists the units in order.  outsize plan MODEL
  --check plan.json  prices an edited plan without running it. To move a cut,
  move patterns from the end of one stage to the start of the next.
"""
_E206 = """
UnsupportedPlan [E206]: this version of outsize cannot run the plan.

Every plan that the search makes runs. This one was written by hand, or by
another version: it has weights on the host with dp or tp in addition to pp, or
dp_shard, cp or ep of a model that runs by modules.

What to do
  outsize explain-plan plan.json  shows it. To have one that runs, plan again:
  outsize plan MODEL --out plan.json
"""
_E301 = """
InvalidSchedule [E301]: a schedule that cannot be run.

A schedule says for each rank in which order it computes, sends and receives.
Before it is simulated or run, it is checked: every forward and backward
appears once, nothing is used before it was made, each send has its receive in
the same order, and the ranks never wait for each other in a circle. The
picture below the message shows the ranks as rows, with the offending cell
marked.

What to do
  Schedules that outsize builds itself pass; if one does not, please report it
  with the picture. In a schedule of your own, put the marked action after what
  it waits for. Microbatches run in order on each stage: the gradients of a
  step are then added in the same order as in the plain loop.
"""
_E401 = """
RankFailed [E401]: a process of the run failed.

The message names the first process that failed, and its traceback is above
the message. The others were ended a few seconds later, because they would
have waited for it forever; their later messages are not the cause.

Usual causes
  - an exception in your own code: read the traceback
  - a process that was killed (signal 9): the machine had no memory left. Plan
    with a --cluster whose memory is really free, or with more microbatches
  - a time-out: one rank stopped sending, for example because the ranks were
    given different batches

What to do
  Fix what the traceback shows. If it is not your code, try  outsize check
  MODEL  in one process, where the same stages run without any network.
"""
_E402 = """
BoundaryMismatch [E402]: a tensor between two stages is not what was captured.

Stages exchange tensors whose shape, dtype and layout are known in advance, so
nothing is negotiated while the model runs. Here a stage made a tensor that
differs from the one that it made when it was captured.

Usual causes
  - a shape that depends on values, such as the number of selected rows
  - autocast that is on in one place and off in the other
  - a module that was changed after the engine had been prepared

What to do
  Run  outsize check MODEL : it names the first unit that diverges. Keep values
  with varying shapes inside one stage, or move the cut: see the plan's units.
"""
_E406 = """
SilentCorruption [E406]: a device computes other bits than others for one work.

Under engine.verify() ranks repeat each other's work and compare bits. Two
ranks had other ones, and a third one, or a second repeat, has decided which
is wrong. The message names it and its machine, the value that differs first,
and whether its repeat is wrong as well: then the device is broken; where the
repeat is right, it was a moment (a particle, heat, power). With two ranks a
device that is always wrong cannot be told from a right one: both are named.

What to do
  The step was dropped before the optimizer: no weight has changed by it. What
  was wrong before the first verified step that says so may be in the weights.
  So go on from a checkpoint of before, without that device:
    outsize run ... --resume RUN
  and look at the device:  outsize doctor --gpu, nvidia-smi -q -d ECC.
"""
_E405 = """
Preempted [E405]: the run was asked to end, and has saved itself.

SIGTERM or SIGUSR1 has reached a rank: somebody, SLURM or Kubernetes takes the
machine away. The step was finished, the run is saved, and it ends with exit
code 75 ("try again later"), which asks for a restart.

What to do
  Start the same command again: it goes on from the folder that the message
  names, on any layout, with the same losses. Where a save takes longer than the
  launcher waits between SIGTERM and SIGKILL:  --shutdown-timeout 120
"""
_E404 = """
RunHung [E404]: ranks wait for one that will not come.

Nothing has moved for 10 s, or for five times the length of a step, and every
rank that others wait for is stopped, gone, or waits itself. The lines below
the message say what each rank does and whose message it waits for; the Python
stack is that of the rank that holds up the others.

Usual causes
  - a process that was stopped (SIGSTOP, a suspended container), or has ended
  - a collective of your own (all_reduce, barrier) that not all ranks call, or
    that they call in another order
  - a rank that leaves its loop earlier: its loader has fewer batches
  - a call in the model that waits for something outside of it

What to do
  Read the named line. Ranks that are slow, not stuck, end no run: they are
  only named.  --watch on_hang=wait  goes on in any case,
  --watch hang_timeout=60  asks later, and  --watch hang_timeout=0  never.
"""

_E403 = """
NotSaved [E403]: a checkpoint could not be written.

The message has the file and what the operating system said: most often that
the disk is full, that the quota is used up, or that the folder may not be
written to. The checkpoints that were published before are whole, and `latest`
names the newest of them. What was written of the new one is removed, or by the
next save if it could not be.

What to do
  Make room (the message says how many bytes the checkpoint needs and how many
  are free), keep fewer (--checkpoint DIR,keep=3), or save to another disk.
"""
_W210 = """
IdleDevices [W210]: the devices computed less than half of the step.

A run continues after a W210, with the right numbers, but slower than it could
be. The causes of the idle time are computed from the measured step, and the
largest one is named:
  the schedule is sequential   naive, or one microbatch: one device at a time
  microbatches are few         filling and draining the pipeline costs as many
                               microbatches as there are stages, less one
  stages are uneven            all wait for the slowest stage
  messages                     sends, waits for messages, and the time of
                               Python between two actions

The predicted gain is the simulator's, from the stage times of this run. It
assumes that a sample costs as much in a smaller microbatch; small microbatches
are slower than that, so try it, or let  outsize tune  try.

What to do
  Type what follows Next. With 1f1b, more microbatches need no more memory for
  activations. For uneven stages, cut by measured times:  outsize tune MODEL
  or  outsize plan MODEL --measure . To see what each device did when:
  outsize trace MODEL .
"""

# Code -> text; tests/unit/report/test_error_texts.py holds it against the tree of errors.
TEXTS = MappingProxyType(
    {
        "E101": _E101,
        "E102": _E102,
        "E103": _E103,
        "E104": _E104,
        "E105": _E105,
        "E106": _E106,
        "E107": _E107,
        "E108": _E108,
        "E111": _E111,
        "E112": _E112,
        "E113": _E113,
        "E201": _E201,
        "E202": _E202,
        "E203": _E203,
        "E204": _E204,
        "E205": _E205,
        "E206": _E206,
        "E301": _E301,
        "E401": _E401,
        "E402": _E402,
        "E403": _E403,
        "E404": _E404,
        "E405": _E405,
        "E406": _E406,
        "W210": _W210,
    }
)


def explain(code: str) -> str:
    """Returns the long text of an error or a warning, for `E201`, `e201` or `NoFeasiblePlan`.

    Raises BadOption for any other word.
    """
    wanted = code.strip().strip("[]").upper()
    for known, text in TEXTS.items():
        name = text.split()[0].upper()
        if wanted in {known, name}:
            return text.strip()
    near = difflib.get_close_matches(wanted, TEXTS, n=1, cutoff=0.0)
    raise BadOption(
        f"no error has the code {code!r}",
        numbers=f"known: {', '.join(TEXTS)}",
        next_step=f"outsize explain {near[0]}",
    )
