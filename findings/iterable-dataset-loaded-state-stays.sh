#!/usr/bin/env bash
# datasets 5.2.0 with torchdata 0.11.0: a state that StatefulDataLoader loads into an IterableDataset counts for every later pass.
# The dataset keeps it, so a state taken behind a pass leaves all later passes empty, and one from within a pass makes every later
# pass begin at that place: its first samples never come back.
#
# Seen (Linux, Python 3.11, torch 2.13.0): after a state from behind the first pass three passes have 0, 0 and 0 batches of 5;
# after one from behind the second batch they have 3, 3 and 3.
set -euo pipefail
folder=$(mktemp -d); trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -qq torch==2.13.0 numpy==2.4.6 torchdata==0.11.0 datasets==5.2.0
cat > "$folder/passes.py" <<'PY'
import datasets
import torchdata
from torchdata.stateful_dataloader import StatefulDataLoader


def loader():
    data = datasets.Dataset.from_dict({"i": list(range(20))}).to_iterable_dataset(num_shards=2)
    return StatefulDataLoader(data, batch_size=4)


def batches_after(state):
    resumed = loader()
    resumed.load_state_dict(state)
    return [len(list(resumed)) for _ in range(3)]


whole = loader()
assert len(list(whole)) == 5
behind = batches_after(whole.state_dict())
part = iter(loaded := loader())
next(part), next(part)
within = batches_after(loaded.state_dict())
print(f"datasets {datasets.__version__}, torchdata {torchdata.__version__}: batches of three passes {behind} and {within}, of 5")
assert behind == [0, 0, 0] and within == [3, 3, 3], "the behaviour has changed"
PY
"$folder/venv/bin/python" "$folder/passes.py"
