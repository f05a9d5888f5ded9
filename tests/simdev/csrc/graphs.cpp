#include "graphs.h"

#include <torch/library.h>

#include <map>
#include <mutex>

#include "device.h"
#include "memory.h"

namespace simdev {

namespace {

struct Graph {
  std::shared_ptr<Recording> recording;
  std::vector<at::Generator> generators;
  std::vector<std::shared_ptr<Draws>> draws;  // Of each generator.
  std::optional<c10::Stream> stream;          // That records.
  bool replayable = false;
};

std::mutex g_mutex;
std::map<int64_t, Graph> g_graphs;
int64_t g_last = 0;

Graph& graph(int64_t id) { return g_graphs.at(id); }

int64_t made() {
  std::lock_guard<std::mutex> lock(g_mutex);
  g_graphs[++g_last] = Graph();
  return g_last;
}

void begin(int64_t id, int64_t pool) {
  auto& one = graph(id);
  TORCH_CHECK(!one.recording, "a graph records once");
  const auto stream = current_stream(current_device());
  TORCH_CHECK(stream.id() != 0, "graphs must be captured on a stream that is not the default one");
  one.generators.push_back(state_of(default_generator(current_device())));
  for (auto& generator : one.generators) one.draws.push_back(begin_draws(generator));
  one.recording = std::make_shared<Recording>();
  one.recording->pool = pool;
  hold_pool(pool);
  one.stream = stream;
  Machine::get().begin_recording(stream, one.recording);
}

void end(int64_t id) {
  auto& one = graph(id);
  TORCH_CHECK(one.stream && *one.stream == current_stream(one.stream->device_index()), "a capture ends on its stream");
  Machine::get().end_recording(*one.stream);
  one.stream.reset();
  for (auto& generator : one.generators) end_draws(generator);
  TORCH_CHECK(one.recording->broken.empty(), "the capture was invalidated: ", one.recording->broken);
  one.replayable = true;
}

void replay(int64_t id) {
  auto& one = graph(id);
  TORCH_CHECK(one.replayable, "replay of a graph that has not been captured");
  const auto stream = current_stream(current_device());
  auto& machine = Machine::get();
  for (size_t i = 0; i < one.generators.size(); ++i) {
    std::vector<uint64_t> seeds(one.draws[i]->seeds.size());
    for (auto& seed : seeds) seed = draw_seed(one.generators[i], current_device()).number;
    machine.launch(stream, [draws = one.draws[i], seeds] { draws->seeds = seeds; });
  }
  for (auto& job : one.recording->jobs) machine.launch(stream, Job(job));
}

void drop(int64_t id) {
  std::lock_guard<std::mutex> lock(g_mutex);
  auto found = g_graphs.find(id);
  if (found == g_graphs.end()) return;
  if (found->second.recording) release_pool(found->second.recording->pool);
  g_graphs.erase(found);
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(simdev, library) {
  library.def("graph_new() -> int", [] { return made(); });
  library.def("graph_register(int id, Generator? generator) -> ()", [](int64_t id, const at::Generator& generator) {
    graph(id).generators.push_back(state_of(generator));
  });
  library.def("graph_begin(int id, int pool) -> ()", [](int64_t id, int64_t pool) { begin(id, pool); });
  library.def("graph_end(int id) -> ()", [](int64_t id) { end(id); });
  library.def("graph_replay(int id) -> ()", [](int64_t id) { replay(id); });
  library.def("graph_drop(int id) -> ()", [](int64_t id) { drop(id); });
}

}  // namespace simdev
