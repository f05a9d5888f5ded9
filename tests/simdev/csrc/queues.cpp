#include "queues.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/Parallel.h>
#include <c10/util/Exception.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <thread>

#include "graphs.h"

// Python's own symbols; the interpreter that loads this library has them.
extern "C" {
int PyGILState_Check();
void* PyEval_SaveThread();
void PyEval_RestoreThread(void*);
int Py_IsInitialized();
}

namespace simdev {

namespace {

// Lets other Python threads run while this one waits, if this one holds the interpreter's lock.
class WithoutGil {
 public:
  WithoutGil() : state_(Py_IsInitialized() && PyGILState_Check() ? PyEval_SaveThread() : nullptr) {}
  ~WithoutGil() {
    if (state_) PyEval_RestoreThread(state_);
  }

 private:
  void* state_;
};

constexpr int kPollsPerStep = 64;

thread_local c10::DeviceIndex t_device = 0;
thread_local std::map<c10::DeviceIndex, int64_t> t_streams;

}  // namespace

c10::DeviceIndex device_count() {
  static const int count = [] {
    const char* text = std::getenv("SIMDEV_DEVICES");
    return text ? std::max(1, std::atoi(text)) : 4;
  }();
  return static_cast<c10::DeviceIndex>(count);
}

c10::DeviceIndex current_device() { return t_device; }

void set_current_device(c10::DeviceIndex device) {
  TORCH_CHECK(device >= 0 && device < device_count(), "sim:", int(device), " is no device of ", int(device_count()));
  t_device = device;
}

c10::Stream current_stream(c10::DeviceIndex device) {
  if (device < 0) device = t_device;
  auto found = t_streams.find(device);
  return c10::Stream(
      c10::Stream::UNSAFE, c10::Device(c10::kPrivateUse1, device), found == t_streams.end() ? 0 : found->second);
}

c10::Stream exchange_stream(c10::Stream stream) {
  auto before = current_stream(stream.device_index());
  t_streams[stream.device_index()] = stream.id();
  return before;
}

c10::Stream new_stream(c10::DeviceIndex device) {
  static std::atomic<int64_t> last{0};
  if (device < 0) device = t_device;
  return c10::Stream(c10::Stream::UNSAFE, c10::Device(c10::kPrivateUse1, device), ++last);
}

Machine& Machine::get() {
  static Machine* machine = new Machine();  // It outlives all threads on purpose.
  return *machine;
}

Machine::Machine() {
  const char* text = std::getenv("SIMDEV_MODE");  // "lazy", "eager" or a seed.
  const std::string mode = text ? text : "lazy";
  if (mode == "lazy" || mode == "eager") {
    kind_ = mode;
  } else {
    kind_ = "random";
    seed_ = std::strtoull(mode.c_str(), nullptr, 10);
    chance_.seed(seed_);
  }
}

Queue& Machine::queue_of(c10::Stream stream) {
  auto& queue = queues_[{stream.device_index(), stream.id()}];
  if (!queue) {
    queue = std::make_unique<Queue>(stream);
    queue->eagerness = eagerness_of(*queue);
  }
  return *queue;
}

// Some streams never run ahead, others nearly always do: races hide when all have the same pace.
double Machine::eagerness_of(const Queue& queue) const {
  if (kind_ == "eager") return 1;
  if (kind_ == "lazy") return 0;
  static constexpr double kChoices[] = {0, 0.1, 0.5, 1};
  std::mt19937_64 choose(seed_ * 1000003 + queue.stream.device_index() * 101 + queue.stream.id());
  choose.discard(3);
  return kChoices[choose() % 4];
}

Point Machine::add(c10::Stream stream, Job job, Point after) {
  Queue& queue = queue_of(stream);
  if (queue.recording) {
    queue.recording->jobs.push_back(std::move(job));
    return {&queue, queue.launched};
  }
  queue.entries.push_back({std::move(job), after});
  if (queue.by_itself) queue.added.notify_one();
  return {&queue, ++queue.launched};
}

Point Machine::append(c10::Stream stream, Job job) {
  Lock lock(mutex_);
  return add(stream, std::move(job), {});
}

Point Machine::launch(c10::Stream stream, Job job) {
  Lock lock(mutex_);
  ++launches_;
  Point point = add(stream, std::move(job), {});
  run_ahead(lock, *point.queue);
  return point;
}

void Machine::wait(c10::Stream stream, Point point) {
  Lock lock(mutex_);
  if (!point.queue || point.queue == &queue_of(stream)) return;
  if (queue_of(stream).recording || point.queue->recording) refuse("a wait between streams");
  if (point.queue->done >= point.count) return;
  add(stream, {}, point);
}

Point Machine::end(c10::Stream stream) {
  Lock lock(mutex_);
  Queue& queue = queue_of(stream);
  return {&queue, queue.launched};
}

bool Machine::passed(Point point) {
  Lock lock(mutex_);
  return !point.queue || point.queue->done >= point.count;
}

std::vector<Queue*> Machine::waiting() {
  std::vector<Queue*> found;
  for (auto& [key, queue] : queues_) {
    if (!queue->entries.empty() && !queue->by_itself) found.push_back(queue.get());
  }
  return found;
}

void Machine::run_ahead(Lock& lock, Queue& launched) {
  if (kind_ == "lazy" || launched.by_itself || launched.recording) return;
  if (launched.eagerness == 1) run_to(lock, {&launched, launched.launched}, false);
  if (kind_ != "random") return;
  const auto waiting = this->waiting();
  if (waiting.empty()) return;
  Queue& chosen = *waiting[chance_() % waiting.size()];
  const double draw = double(chance_() % 1000) / 1000;
  const uint64_t steps = 1 + chance_() % 8;
  if (draw < chosen.eagerness) {
    run_to(lock, {&chosen, std::min(chosen.launched, chosen.done + steps)}, false);
  }
}

bool Machine::poll(Point point) {
  Lock lock(mutex_);
  if (!point.queue) return true;
  Queue& queue = *point.queue;
  if (queue.recording) refuse("a query of an event");
  const bool was = queue.done >= point.count;
  if (kind_ == "random" && chance_() % 2) {
    // The answer may be from before or from after the progress, as on a device that works meanwhile.
    for (auto* other : waiting()) {
      if (chance_() % 3 == 0) {
        run_to(lock, {other, std::min(other->launched, other->done + 1 + chance_() % 8)}, false);
      }
    }
    return chance_() % 2 ? was : queue.done >= point.count;
  }
  // Whoever only polls must come to an end in each mode.
  if (!was && !queue.by_itself && ++polls_ % kPollsPerStep == 0) {
    run_to(lock, {&queue, queue.done + 1}, false);
  }
  return queue.done >= point.count;
}

void Machine::finish(Point point, const std::string& what) {
  Lock lock(mutex_);
  refuse(what);
  count_wait(what);
  if (point.queue) run_to(lock, point);
  raise_failure(lock);
}

void Machine::finish_device(c10::DeviceIndex device, const std::string& what) {
  Lock lock(mutex_);
  refuse(what);
  count_wait(what);
  std::vector<Point> ends;
  for (auto& [key, queue] : queues_) {
    if (key.first == device) ends.push_back({queue.get(), queue->launched});
  }
  // The order of streams is no promise, so the newest comes first: it hurts most.
  for (auto point = ends.rbegin(); point != ends.rend(); ++point) run_to(lock, *point);
  raise_failure(lock);
}

void Machine::run_now(c10::Stream stream, Job job, const std::string& what) {
  std::exception_ptr raised;
  Lock lock(mutex_);
  refuse(what);
  ++launches_;
  count_wait(what);
  Point point = add(
      stream,
      [&raised, &job] {
        try {
          job();
        } catch (...) {
          raised = std::current_exception();
        }
      },
      {});
  run_to(lock, point);
  if (raised) std::rethrow_exception(raised);
  raise_failure(lock);
}

void Machine::run_to(Lock& lock, Point point, bool patient) {
  if (point.queue->done >= point.count) return;
  std::shared_ptr<Request> request;
  if (!point.queue->by_itself) {
    start_thread();
    request = std::make_shared<Request>(Request{point, patient});
    requests_.push_back(request);
    tell_kernels_thread();
  }
  lock.unlock();
  {
    WithoutGil released;
    lock.lock();
    advanced_.wait(lock, [&] { return request ? request->over : point.queue->done >= point.count; });
    lock.unlock();
  }
  lock.lock();
}

void Machine::start_thread() {
  const int here = getpid();
  if (process_ == here) return;
  process_ = here;
  requests_.clear();
  std::thread([this] { serve(); }).detach();
}

void Machine::run_by_itself(c10::Stream stream) {
  Lock lock(mutex_);
  Queue& queue = queue_of(stream);
  queue.by_itself = true;
  std::thread([this, &queue] { serve_alone(queue); }).detach();
}

void Machine::tell_kernels_thread() {
  ++news_;
  asked_.notify_one();
}

void Machine::serve() {
  at::AutoDispatchBelowADInplaceOrView no_autograd;
  at::init_num_threads();
  Lock lock(mutex_);
  while (true) {
    const auto seen = news_;
    bool ended = false;
    for (size_t i = 0; i < requests_.size(); ++i) {
      auto request = requests_[i];
      if (request->over || (!work(lock, request->point) && request->patient)) continue;
      request->over = ended = true;
    }
    std::erase_if(requests_, [](auto& request) { return request->over; });
    if (ended) advanced_.notify_all();
    asked_.wait(lock, [&] { return ended || news_ != seen; });
  }
}

void Machine::serve_alone(Queue& queue) {
  at::AutoDispatchBelowADInplaceOrView no_autograd;
  at::init_num_threads();
  Lock lock(mutex_);
  while (true) {
    queue.added.wait(lock, [&] { return !queue.entries.empty(); });
    const Point after = queue.entries.front().after;
    if (after.queue) run_to(lock, after);
    run_first(lock, queue);
    advanced_.notify_all();
    tell_kernels_thread();
  }
}

bool Machine::work(Lock& lock, Point point) {
  Queue& queue = *point.queue;
  while (queue.done < point.count) {
    const Point after = queue.entries.front().after;
    if (after.queue && after.queue->done < after.count && (after.queue->by_itself || !work(lock, after))) {
      return false;
    }
    run_first(lock, queue);
  }
  return true;
}

void Machine::run_first(Lock& lock, Queue& queue) {
  Job job = std::move(queue.entries.front().job);
  lock.unlock();
  std::string failure;
  try {
    if (job) job();
  } catch (const std::exception& error) {
    failure = error.what();
  } catch (...) {
    failure = "an unknown exception";
  }
  job = nullptr;
  lock.lock();
  if (!failure.empty() && failure_.empty()) failure_ = failure;
  queue.entries.pop_front();
  ++queue.done;
}

void Machine::raise_failure(Lock& lock) {
  if (failure_.empty()) return;
  const std::string failure = std::move(failure_);
  failure_.clear();
  lock.unlock();
  TORCH_CHECK(false, "a kernel on a simulated device failed, some time before this wait: ", failure);
}

void Machine::refuse(const std::string& what) {
  for (auto& [key, queue] : queues_) {
    if (!queue->recording) continue;
    if (queue->recording->broken.empty()) queue->recording->broken = what;
    TORCH_CHECK(false, "operation not permitted while a stream records a graph: ", what);
  }
}

void Machine::insist_on_no_recording(const std::string& what) {
  Lock lock(mutex_);
  refuse(what);
}

void Machine::begin_recording(c10::Stream stream, std::shared_ptr<Recording> recording) {
  Lock lock(mutex_);
  queue_of(stream).recording = std::move(recording);
}

void Machine::end_recording(c10::Stream stream) {
  Lock lock(mutex_);
  queue_of(stream).recording = nullptr;
}

std::shared_ptr<Recording> Machine::recording(c10::Stream stream) {
  Lock lock(mutex_);
  return queue_of(stream).recording;
}

void Machine::set_mode(const std::string& kind, uint64_t seed) {
  TORCH_CHECK(kind == "lazy" || kind == "eager" || kind == "random", "no mode of simdev: ", kind);
  Lock lock(mutex_);
  kind_ = kind;
  seed_ = seed;
  chance_.seed(seed);
  for (auto& [key, queue] : queues_) queue->eagerness = eagerness_of(*queue);
}

void Machine::count_wait(const std::string& what) { ++waits_[what]; }

int64_t Machine::host_waits() {
  Lock lock(mutex_);
  int64_t total = 0;
  for (auto& [name, count] : waits_) total += count;
  return total;
}

int64_t Machine::launches() {
  Lock lock(mutex_);
  return launches_;
}

std::vector<std::string> Machine::waits_by_name() {
  Lock lock(mutex_);
  std::vector<std::pair<int64_t, std::string>> sorted;
  for (auto& [name, count] : waits_) sorted.push_back({-count, name});
  std::sort(sorted.begin(), sorted.end());
  std::vector<std::string> lines;
  for (auto& [count, name] : sorted) lines.push_back(name + " " + std::to_string(-count));
  return lines;
}

void Machine::reset_counters() {
  Lock lock(mutex_);
  waits_.clear();
  launches_ = 0;
}

int64_t Machine::pending(c10::DeviceIndex device) {
  Lock lock(mutex_);
  int64_t total = 0;
  for (auto& [key, queue] : queues_) {
    if (key.first == device) total += int64_t(queue->entries.size());
  }
  return total;
}

}  // namespace simdev
