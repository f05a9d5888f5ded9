// What torch asks of a device type: the guard (devices, streams, events), the hooks, and a generator per device.
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/core/CachingHostAllocator.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <chrono>

#include "device.h"
#include "memory.h"
#include "queues.h"

namespace simdev {

namespace {

using Clock = std::chrono::steady_clock;

// An event is the point at which it was last recorded, and when the device passed it.
struct Event {
  Point point;
  std::shared_ptr<Clock::time_point> passed_at;
};

struct Guard final : public c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return c10::kPrivateUse1; }
  c10::Device exchangeDevice(c10::Device device) const override {
    const c10::Device before(c10::kPrivateUse1, current_device());
    if (device.index() >= 0) set_current_device(device.index());
    return before;
  }
  c10::Device getDevice() const override { return {c10::kPrivateUse1, current_device()}; }
  void setDevice(c10::Device device) const override {
    if (device.index() >= 0) set_current_device(device.index());
  }
  void uncheckedSetDevice(c10::Device device) const noexcept override {
    if (device.index() >= 0 && device.index() < device_count()) set_current_device(device.index());
  }
  c10::Stream getStream(c10::Device device) const override { return current_stream(device.index()); }
  c10::Stream getDefaultStream(c10::Device device) const override {
    const auto index = device.index() < 0 ? current_device() : device.index();
    return c10::Stream(c10::Stream::DEFAULT, c10::Device(c10::kPrivateUse1, index));
  }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool) const override {
    return new_stream(device.index());
  }
  c10::Stream getNewStream(c10::Device device, int) const override { return new_stream(device.index()); }
  c10::Stream exchangeStream(c10::Stream stream) const override { return exchange_stream(stream); }
  c10::DeviceIndex deviceCount() const noexcept override { return device_count(); }
  c10::DeviceCapability getDeviceCapability(c10::Device) const override { return {}; }
  void* getStreamNativeHandle(const c10::Stream stream) const override {
    return reinterpret_cast<void*>(stream.id());
  }

  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override {
    delete static_cast<Event*>(event);
  }
  void record(void** event, const c10::Stream& stream, const c10::DeviceIndex, const c10::EventFlag flag)
      const override {
    if (!*event) *event = new Event();
    auto& found = *static_cast<Event*>(*event);
    if (flag == c10::EventFlag::BACKEND_DEFAULT) {
      auto passed_at = std::make_shared<Clock::time_point>();
      found.passed_at = passed_at;
      found.point = Machine::get().append(stream, [passed_at] { *passed_at = Clock::now(); });
    } else {
      found.point = Machine::get().end(stream);
    }
  }
  void block(void* event, const c10::Stream& stream) const override {
    if (event) Machine::get().wait(stream, static_cast<Event*>(event)->point);
  }
  bool queryEvent(void* event) const override {
    return !event || Machine::get().poll(static_cast<Event*>(event)->point);
  }
  void synchronizeEvent(void* event) const override {
    if (event) Machine::get().finish(static_cast<Event*>(event)->point, "event.synchronize");
  }
  double elapsedTime(void* from, void* to, const c10::DeviceIndex) const override {
    auto *a = static_cast<Event*>(from), *b = static_cast<Event*>(to);
    TORCH_CHECK(a && b && a->passed_at && b->passed_at, "elapsed_time needs two recorded events with timing");
    auto& machine = Machine::get();
    TORCH_CHECK(
        machine.passed(a->point) && machine.passed(b->point),
        "elapsed_time of an event that the device has not passed: wait for it first");
    return std::chrono::duration<double, std::milli>(*b->passed_at - *a->passed_at).count();
  }

  bool queryStream(const c10::Stream& stream) const override {
    return Machine::get().poll(Machine::get().end(stream));
  }
  void synchronizeStream(const c10::Stream& stream) const override {
    Machine::get().finish(Machine::get().end(stream), "stream.synchronize");
  }
  void synchronizeDevice(const c10::DeviceIndex device) const override {
    Machine::get().finish_device(device < 0 ? current_device() : device, "device.synchronize");
  }
  void recordDataPtrOnStream(const c10::DataPtr& ptr, const c10::Stream& stream) const override {
    device_allocator().recordStream(ptr, stream);
  }
};

C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

// The state of a generator; several generators may have one.
struct GeneratorState {
  c10::intrusive_ptr<at::CPUGeneratorImpl> seeds = c10::make_intrusive<at::CPUGeneratorImpl>();
  std::shared_ptr<Draws> recorded;  // Of the graph that is captured.
};

// A generator gives each random kernel a seed when it is launched; the kernel draws from that seed when it runs.
class Generator final : public c10::GeneratorImpl {
 public:
  explicit Generator(c10::DeviceIndex device)
      : c10::GeneratorImpl(
            c10::Device(c10::kPrivateUse1, device), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1)),
        state_(std::make_shared<GeneratorState>()) {}

  void set_current_seed(uint64_t seed) override {
    insist_on_no_capture();
    state_->seeds->set_current_seed(seed);
  }
  void set_offset(uint64_t) override { TORCH_CHECK(false, "a generator of a simulated device has no offset"); }
  uint64_t get_offset() const override {
    TORCH_CHECK(false, "a generator of a simulated device has no offset");
  }
  uint64_t current_seed() const override { return state_->seeds->current_seed(); }
  uint64_t seed() override {
    insist_on_no_capture();
    return state_->seeds->seed();
  }
  void set_state(const c10::TensorImpl& state) override {
    insist_on_no_capture();
    state_->seeds->set_state(state);
  }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override { return state_->seeds->get_state(); }
  void graphsafe_set_state(const c10::intrusive_ptr<c10::GeneratorImpl>& other) override {
    state_ = static_cast<Generator*>(other.get())->state_;
  }
  c10::intrusive_ptr<c10::GeneratorImpl> graphsafe_get_state() const override {
    auto same = c10::make_intrusive<Generator>(device_.index());
    same->state_ = state_;
    return same;
  }
  KernelSeed draw() {
    if (!Machine::get().recording(current_stream(device_.index()))) return {state_->seeds->random64()};
    TORCH_CHECK(state_->recorded, "a draw of a captured graph is from a generator that is not registered with it");
    state_->recorded->seeds.push_back(0);
    return {0, state_->recorded, state_->recorded->seeds.size() - 1};
  }
  void record(std::shared_ptr<Draws> draws) { state_->recorded = std::move(draws); }

 private:
  GeneratorImpl* clone_impl() const override {
    auto* copy = new Generator(device_.index());
    copy->state_->seeds->set_state(*state_->seeds->get_state());
    return copy;
  }
  void insist_on_no_capture() const {
    if (Machine::get().recording(current_stream(device_.index()))) {
      Machine::get().insist_on_no_recording("seeding a generator");
    }
  }
  std::shared_ptr<GeneratorState> state_;
};

Generator* generator_of(const at::Generator& generator) {
  return static_cast<Generator*>(generator.unsafeGetGeneratorImpl());
}

}  // namespace

const at::Generator& default_generator(c10::DeviceIndex device) {
  static std::vector<at::Generator>* all = [] {
    auto* made = new std::vector<at::Generator>();
    for (c10::DeviceIndex i = 0; i < device_count(); ++i) made->push_back(at::make_generator<Generator>(i));
    return made;
  }();
  return all->at(size_t(device < 0 ? current_device() : device));
}

at::Generator state_of(const at::Generator& generator) { return generator.graphsafe_get_state(); }

std::shared_ptr<Draws> begin_draws(const at::Generator& generator) {
  auto draws = std::make_shared<Draws>();
  generator_of(generator)->record(draws);
  return draws;
}

void end_draws(const at::Generator& generator) { generator_of(generator)->record(nullptr); }

KernelSeed draw_seed(const std::optional<at::Generator>& generator, c10::DeviceIndex device) {
  at::Generator from = generator && generator->defined() ? *generator : default_generator(device);
  TORCH_CHECK(
      from.device().type() == c10::kPrivateUse1, "Expected a 'sim' device type for generator but found '",
      from.device().type(), "'");
  std::lock_guard<std::mutex> lock(from.mutex());
  return generator_of(from)->draw();
}

namespace {

struct Hooks final : public at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  void init() const override {}
  c10::DeviceIndex deviceCount() const override { return device_count(); }
  void setCurrentDevice(c10::DeviceIndex device) const override { set_current_device(device); }
  c10::DeviceIndex getCurrentDevice() const override { return current_device(); }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex device) const override {
    const auto before = current_device();
    set_current_device(device);
    return before;
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex device) const override {
    return device < 0 || device >= device_count() ? current_device() : exchangeDevice(device);
  }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex device) const override {
    return default_generator(device);
  }
  at::Generator getNewGenerator(c10::DeviceIndex device) const override {
    return at::make_generator<Generator>(device < 0 ? current_device() : device);
  }
  at::Device getDeviceFromPtr(void* data) const override {
    return {c10::kPrivateUse1, device_of_address(data)};
  }
  bool isPinnedPtr(const void* data) const override { return is_pinned(data); }
  at::Allocator* getPinnedMemoryAllocator() const override { return at::getHostAllocator(c10::kPrivateUse1); }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t bytes) const override {
    resize_storage(storage.unsafeGetStorageImpl(), bytes);
  }
};

struct RegisterHooks {
  RegisterHooks() { at::RegisterPrivateUse1HooksInterface(new Hooks()); }
} const g_hooks;

}  // namespace

void resize_storage(c10::StorageImpl* storage, size_t bytes) {
  const auto device = storage->device();
  c10::DeviceGuard guard(device);
  auto fresh = device_allocator().allocate(bytes);
  const size_t kept = std::min(bytes, storage->nbytes());
  if (kept) {
    void* to = kernel_address(fresh.get());
    const void* from = kernel_address(storage->data());
    Machine::get().launch(current_stream(device.index()), [=] { std::memcpy(to, from, kept); });
  }
  storage->set_data_ptr_noswap(std::move(fresh));
  storage->set_nbytes(bytes);
}

}  // namespace simdev
