// Graphs of a simulated device: what is launched on one stream is recorded, and launched again as often as wanted.
//
// As CUDA's: while a stream records, its jobs do not run, the host may wait for nothing, no generator may be seeded,
// and memory comes from the graph's own pool. A replay is the same jobs with the same addresses; only the numbers by
// which its draws are seeded are new.
#pragma once

#include <c10/core/Stream.h>

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "queues.h"

namespace simdev {

// The seeds of the draws that a graph has recorded from one generator; a replay sets them by a job.
struct Draws {
  std::vector<uint64_t> seeds;
};

// The seed of one random kernel: a number, or a place among the draws of a graph.
struct KernelSeed {
  uint64_t number = 0;
  std::shared_ptr<Draws> draws;
  size_t place = 0;
  uint64_t now() const { return draws ? draws->seeds.at(place) : number; }
};

// What a stream has recorded.
struct Recording {
  std::vector<Job> jobs;
  std::string broken;  // Why the capture is of no use.
  int64_t pool = 0;
};

}  // namespace simdev
