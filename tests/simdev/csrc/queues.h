// The queues of work of the simulated devices.
//
// A stream is a queue of jobs. A job runs only when somebody waits for it: the host (a copy to the host, an
// event, a synchronize), or a job of another stream that was told to wait for an event. So a wait that is
// missing in the program under test is missing here, too: the job that should have run first has not run, and
// its memory still holds what it held before. With a seed, streams also run ahead by chance, at launches and at
// polls, which finds what goes wrong when a stream is early.
//
// All jobs run one at a time on one thread, the kernels' thread, whose torch state (modes, autograd, threads) is
// a fresh one, whoever waits. Only the streams of communicators have a thread each and run by themselves, since
// their jobs wait for other processes: they begin as soon as what they were told to wait for is done, and ask for
// that. A stream that waits for a communicator stands still, and the kernels' thread goes on with others.
#pragma once

#include <c10/core/Stream.h>

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <string>
#include <vector>

namespace simdev {

using Job = std::function<void()>;

struct Queue;
struct Recording;

// A point in a queue: it is passed when the first `count` entries have run.
struct Point {
  Queue* queue = nullptr;
  uint64_t count = 0;
};

struct Entry {
  Job job;      // May be empty, for an entry that only waits.
  Point after;  // The entry runs behind this point of another queue; no queue means no condition.
};

struct Queue {
  c10::Stream stream;
  std::deque<Entry> entries;
  uint64_t launched = 0;
  uint64_t done = 0;
  double eagerness = 0;  // The chance that the queue runs ahead at a launch; a seed chooses it.
  bool by_itself = false;  // The queue of a communicator, which has a thread.
  std::shared_ptr<Recording> recording;  // Jobs are recorded here and do not run.
  std::condition_variable added;
  explicit Queue(c10::Stream s) : stream(s) {}
};

// What somebody asks of the kernels' thread: to run a queue up to a point, or only as far as it can.
struct Request {
  Point point;
  bool patient;  // Whoever asks waits until the point is passed.
  bool over = false;
};

class Machine {
 public:
  static Machine& get();

  // Adds a job at the end of a stream. The streams may then run ahead, as the mode says.
  Point launch(c10::Stream stream, Job job);
  // Adds a job without letting any stream run: for callers that must not wait, such as the end of a tensor.
  Point append(c10::Stream stream, Job job);
  // Orders what comes next on the stream behind the point.
  void wait(c10::Stream stream, Point point);
  // Gives a stream a thread of its own, which runs its jobs by itself.
  void run_by_itself(c10::Stream stream);
  // Jobs of the stream are recorded from now on, and no host may wait until that ends.
  void begin_recording(c10::Stream stream, std::shared_ptr<Recording> recording);
  void end_recording(c10::Stream stream);
  // Returns what the stream records; none where it runs its jobs.
  std::shared_ptr<Recording> recording(c10::Stream stream);
  // Raises, and invalidates what is recorded, where some stream records.
  void insist_on_no_recording(const std::string& what);
  // Returns the present end of a stream.
  Point end(c10::Stream stream);
  // Returns whether a point is passed; running ahead is not tried.
  bool passed(Point point);
  // The host asks without waiting. By chance, or in the lazy mode after many polls, some work runs first.
  bool poll(Point point);
  // The host waits. Raises what a kernel has raised since the last wait. `what` counts the wait under a name.
  void finish(Point point, const std::string& what);
  void finish_device(c10::DeviceIndex device, const std::string& what);
  // Adds a job, waits for it, and raises what the job itself raised.
  void run_now(c10::Stream stream, Job job, const std::string& what);

  // "lazy", "eager" (every job runs at its launch), or "random" with a seed.
  void set_mode(const std::string& kind, uint64_t seed);

  int64_t host_waits();
  int64_t launches();
  std::vector<std::string> waits_by_name();  // "name count", the most frequent first.
  void reset_counters();
  int64_t pending(c10::DeviceIndex device);

 private:
  Machine();
  using Lock = std::unique_lock<std::mutex>;

  Queue& queue_of(c10::Stream stream);
  double eagerness_of(const Queue& queue) const;
  Point add(c10::Stream stream, Job job, Point after);
  void run_ahead(Lock& lock, Queue& launched);
  // Called by any thread; the kernels' thread, or that of a communicator, does the work.
  void run_to(Lock& lock, Point point, bool patient = true);
  bool work(Lock& lock, Point point);  // On the kernels' thread; false where a communicator is behind.
  void run_first(Lock& lock, Queue& queue);
  void tell_kernels_thread();
  void serve();
  void serve_alone(Queue& queue);
  std::vector<Queue*> waiting();
  void start_thread();
  void count_wait(const std::string& what);
  void raise_failure(Lock& lock);
  void refuse(const std::string& what);  // Raises where some stream records.

  std::mutex mutex_;
  std::condition_variable asked_, advanced_;
  std::map<std::pair<int, int64_t>, std::unique_ptr<Queue>> queues_;
  std::deque<std::shared_ptr<Request>> requests_;
  uint64_t news_ = 0;  // Requests, and steps of communicators, for which the kernels' thread may go on.
  std::string failure_;
  std::map<std::string, int64_t> waits_;
  std::mt19937_64 chance_;
  std::string kind_ = "lazy";
  uint64_t seed_ = 0;
  int64_t launches_ = 0, polls_ = 0;
  int process_ = 0;  // The process whose kernels' thread runs; a fork has none until it asks.
};

// The current device and the current stream of each device, for this thread.
c10::DeviceIndex device_count();
c10::DeviceIndex current_device();
void set_current_device(c10::DeviceIndex device);
c10::Stream current_stream(c10::DeviceIndex device);
c10::Stream exchange_stream(c10::Stream stream);
c10::Stream new_stream(c10::DeviceIndex device);

}  // namespace simdev
