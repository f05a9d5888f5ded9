#include "memory.h"

#include <ATen/core/CachingHostAllocator.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/InlineDeviceGuard.h>
#include <c10/util/Exception.h>
#include <sys/mman.h>

#include <cstdlib>
#include <cstring>
#include <list>
#include <map>
#include <mutex>
#include <set>
#include <vector>

#include "graphs.h"

namespace simdev {

namespace {

constexpr size_t kRange = size_t(32) << 30;  // Addresses of one device.
constexpr size_t kUnit = 512;                // Sizes of blocks are multiples of it.
constexpr size_t kPage = 4096;

size_t rounded(size_t bytes) { return (bytes + kUnit - 1) / kUnit * kUnit; }

// Two ranges of addresses of equal size: the one that the program sees, and the one with memory behind it.
struct AddressSpace {
  char* seen;
  char* real;
  size_t size;

  AddressSpace() : size(kRange * size_t(device_count())) {
    const int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
    seen = static_cast<char*>(mmap(nullptr, size, PROT_NONE, flags, -1, 0));
    real = static_cast<char*>(mmap(nullptr, size, PROT_READ | PROT_WRITE, flags, -1, 0));
    TORCH_CHECK(seen != MAP_FAILED && real != MAP_FAILED, "no address space for the simulated devices");
  }
  static AddressSpace& get() {
    static AddressSpace* space = new AddressSpace();
    return *space;
  }
  bool holds(const void* address) const {
    auto* at = static_cast<const char*>(address);
    return at >= seen && at < seen + size;
  }
};

struct Block {
  c10::Stream home;  // The stream on which it was allocated.
  char* address;
  size_t size;
  int64_t pool;  // Its list of free blocks: a stream's by its id, a graph's pool by its negative number.
  size_t counted = 0;  // Bytes that the statistics count while the block is in use.
  std::set<int64_t> users;  // Other streams of `record_stream`, by id.
  std::vector<Point> busy;  // Points that these streams have to pass before the block is free.
};

c10::Stream stream_of(c10::DeviceIndex device, int64_t id) {
  return c10::Stream(c10::Stream::UNSAFE, c10::Device(c10::kPrivateUse1, device), id);
}

void fill_with_nan(const Block& block) {
  void* real = kernel_address(block.address);
  Machine::get().append(block.home, [real, size = block.size] { std::memset(real, 0xFF, size); });
}

using c10::CachingAllocator::StatType;
constexpr size_t kAll = static_cast<size_t>(StatType::AGGREGATE);

// The blocks of one device. All methods are called under the allocator's lock.
struct Pool {
  std::map<char*, size_t> unused;  // Ranges of addresses without a block.
  std::map<int64_t, std::multimap<size_t, Block*>> free;  // By `Block::pool`, then by size.
  std::map<int64_t, int> held;     // Graphs of each pool.
  std::list<Block*> busy;          // Freed, but other streams may still use them.
  size_t reserved = 0, cap = 0;
  c10::CachingDeviceAllocator::DeviceStats stats;

  // Of blocks of one size the one that was freed last is given out first: somebody may still read it. It is filled
  // when it is given out and not when it is freed, because its stream may have waited for its last readers between.
  Block* reuse(c10::Stream stream, int64_t from, size_t size) {
    auto& blocks = free[from];
    auto found = blocks.lower_bound(size);
    if (found == blocks.end() || found->first > size + size / 4) return nullptr;
    found = std::prev(blocks.upper_bound(found->first));
    Block* block = found->second;
    blocks.erase(found);
    block->home = stream;
    fill_with_nan(*block);
    return block;
  }

  Block* make(c10::Stream stream, int64_t from, size_t size) {
    if (reserved + size > cap) return nullptr;
    for (auto range = unused.begin(); range != unused.end(); ++range) {
      if (range->second < size) continue;
      auto [address, length] = *range;
      unused.erase(range);
      if (length > size) unused[address + size] = length - size;
      reserved += size;
      stats.reserved_bytes[kAll].increase(size);
      // No job uses these bytes, so they are filled at once: a reader that is too early finds NaN.
      std::memset(kernel_address(address), 0xFF, size);
      return new Block{stream, address, size, from};
    }
    return nullptr;
  }

  void release_free() {
    for (auto& [id, blocks] : free) {
      if (held.count(id)) continue;
      for (auto& [size, block] : blocks) {
        reserved -= size;
        stats.reserved_bytes[kAll].decrease(size);
        auto* from = reinterpret_cast<char*>((reinterpret_cast<uintptr_t>(kernel_address(block->address)) + kPage - 1) / kPage * kPage);
        auto* to = static_cast<char*>(kernel_address(block->address)) + size;
        if (to - from >= ptrdiff_t(kPage)) madvise(from, size_t(to - from) / kPage * kPage, MADV_DONTNEED);
        add_range(block->address, size);
        delete block;
      }
      blocks.clear();
    }
  }

  void add_range(char* address, size_t size) {
    auto next = unused.lower_bound(address);
    if (next != unused.end() && address + size == next->first) {
      size += next->second;
      next = unused.erase(next);
    }
    if (next != unused.begin()) {
      auto before = std::prev(next);
      if (before->first + before->second == address) {
        before->second += size;
        return;
      }
    }
    unused[address] = size;
  }

  void give_back(Block* block) {
    free[block->pool].insert({block->size, block});
  }

  // Blocks whose other users have passed become free.
  void look_at_busy() {
    for (auto at = busy.begin(); at != busy.end();) {
      bool passed = true;
      for (auto& point : (*at)->busy) passed = passed && Machine::get().passed(point);
      if (!passed) {
        ++at;
        continue;
      }
      (*at)->busy.clear();
      give_back(*at);
      at = busy.erase(at);
    }
  }
};

class Allocator final : public c10::DeviceAllocator {
 public:
  Allocator() : pools_(size_t(device_count())) {
    const char* text = std::getenv("SIMDEV_MEMORY");  // Bytes of each device.
    const size_t cap = text ? std::strtoull(text, nullptr, 10) : size_t(8) << 30;
    for (size_t i = 0; i < pools_.size(); ++i) {
      pools_[i].cap = cap;
      pools_[i].unused[AddressSpace::get().seen + i * kRange] = kRange;
    }
  }

  c10::DataPtr allocate(size_t bytes) override {
    const auto index = current_device();
    const c10::Device device(c10::kPrivateUse1, index);
    if (bytes == 0) return {nullptr, nullptr, &Allocator::free, device};
    const size_t size = rounded(bytes);
    const auto stream = current_stream(index);
    const auto recording = Machine::get().recording(stream);
    const int64_t from = recording ? -recording->pool : stream.id();
    Block* block = find(stream, from, size);
    if (!block && recording) {
      recording->broken = "no memory";
    } else if (!block) {
      // As CUDA's: the device is idled, and what is cached is given back, before the memory counts as full.
      Machine::get().finish_device(index, "allocator retry");
      {
        std::lock_guard<std::mutex> lock(mutex_);
        pool(index).look_at_busy();
      }
      Machine::get().finish_device(index, "allocator retry");
      {
        std::lock_guard<std::mutex> lock(mutex_);
        pool(index).release_free();
        ++pool(index).stats.num_alloc_retries;
      }
      block = find(stream, from, size);
    }
    if (!block) raise_full(index, bytes);
    std::lock_guard<std::mutex> lock(mutex_);
    block->counted = size;
    auto& stats = pool(index).stats;
    stats.allocated_bytes[kAll].increase(size);
    stats.active_bytes[kAll].increase(size);
    stats.requested_bytes[kAll].increase(bytes);
    stats.allocation[kAll].increase(1);
    return {block->address, block, &Allocator::free, device};
  }

  c10::DeleterFnPtr raw_deleter() const override { return nullptr; }

  void copy_data(void* to, const void* from, size_t bytes) const override {
    void* real_to = kernel_address(to);
    const void* real_from = kernel_address(from);
    Machine::get().launch(
        current_stream(device_of_address(to)), [=] { std::memcpy(real_to, real_from, bytes); });
  }

  bool initialized() override { return true; }

  void emptyCache(c10::MempoolId_t) override {
    const auto index = current_device();
    Machine::get().finish_device(index, "empty_cache");
    {
      std::lock_guard<std::mutex> lock(mutex_);
      pool(index).look_at_busy();
    }
    Machine::get().finish_device(index, "empty_cache");
    std::lock_guard<std::mutex> lock(mutex_);
    pool(index).release_free();
  }

  void recordStream(const c10::DataPtr& ptr, c10::Stream stream) override {
    if (!ptr.get() || ptr.get_deleter() != &Allocator::free) return;
    std::lock_guard<std::mutex> lock(mutex_);
    auto* block = static_cast<Block*>(ptr.get_context());
    if (stream != block->home) block->users.insert(stream.id());
  }

  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex device) override {
    std::lock_guard<std::mutex> lock(mutex_);
    return pool(device).stats;
  }
  void resetAccumulatedStats(c10::DeviceIndex device) override {
    std::lock_guard<std::mutex> lock(mutex_);
    for (auto* stat : stats_of(device)) stat->reset_accumulated();
  }
  void resetPeakStats(c10::DeviceIndex device) override {
    std::lock_guard<std::mutex> lock(mutex_);
    for (auto* stat : stats_of(device)) stat->reset_peak();
  }
  std::pair<size_t, size_t> getMemoryInfo(c10::DeviceIndex device) override {
    std::lock_guard<std::mutex> lock(mutex_);
    auto& p = pool(device);
    return {p.cap - std::min(p.cap, p.reserved), p.cap};
  }

  void hold(int64_t pool) {
    std::lock_guard<std::mutex> lock(mutex_);
    for (auto& p : pools_) ++p.held[-pool];
  }
  void release(int64_t pool) {
    std::lock_guard<std::mutex> lock(mutex_);
    for (auto& p : pools_) {
      if (--p.held[-pool] == 0) p.held.erase(-pool);
    }
  }
  void set_cap(c10::DeviceIndex device, size_t bytes) {
    std::lock_guard<std::mutex> lock(mutex_);
    pool(device).cap = bytes;
  }
  size_t cap(c10::DeviceIndex device) {
    std::lock_guard<std::mutex> lock(mutex_);
    return pool(device).cap;
  }

 private:
  Pool& pool(c10::DeviceIndex device) { return pools_.at(size_t(device)); }

  std::vector<c10::CachingAllocator::Stat*> stats_of(c10::DeviceIndex device) {
    auto& s = pool(device).stats;
    return {&s.allocated_bytes[kAll], &s.active_bytes[kAll], &s.reserved_bytes[kAll],
            &s.requested_bytes[kAll], &s.allocation[kAll]};
  }

  Block* find(c10::Stream stream, int64_t from, size_t size) {
    std::lock_guard<std::mutex> lock(mutex_);
    auto& p = pool(stream.device_index());
    p.look_at_busy();
    Block* block = p.reuse(stream, from, size);
    return block ? block : p.make(stream, from, size);
  }

  void raise_full(c10::DeviceIndex device, size_t bytes) {
    std::lock_guard<std::mutex> lock(mutex_);
    auto& p = pool(device);
    ++p.stats.num_ooms;
    TORCH_CHECK_WITH(
        OutOfMemoryError, false, "SIM out of memory. Tried to allocate ", bytes, " bytes. sim:", int(device),
        " has a capacity of ", p.cap, " bytes, of which ", p.stats.allocated_bytes[kAll].current,
        " are allocated.");
  }

  static void free(void* context);

  std::mutex mutex_;
  std::vector<Pool> pools_;
};

Allocator& allocator() {
  static Allocator* one = new Allocator();
  return *one;
}

void Allocator::free(void* context) {
  if (!context) return;
  auto* block = static_cast<Block*>(context);
  auto& self = allocator();
  std::lock_guard<std::mutex> lock(self.mutex_);
  auto& pool = self.pool(block->home.device_index());
  pool.stats.allocated_bytes[kAll].decrease(block->counted);
  pool.stats.active_bytes[kAll].decrease(block->counted);
  pool.stats.allocation[kAll].decrease(1);
  if (block->users.empty()) {
    pool.give_back(block);
    return;
  }
  for (int64_t id : block->users) {
    block->busy.push_back(Machine::get().end(stream_of(block->home.device_index(), id)));
  }
  block->users.clear();
  pool.busy.push_back(block);
}

// Page-locked memory: ordinary memory whose addresses are known, so that a copy may use it later.
struct Piece {
  size_t size;
  std::vector<Point> users;  // Copies that may not have run yet.
};

class PinnedAllocator final : public at::HostAllocator {
 public:
  c10::DataPtr allocate(size_t bytes) override {
    const size_t size = std::max<size_t>(64, (bytes + 63) / 64 * 64);
    std::lock_guard<std::mutex> lock(mutex_);
    look_at_freed();
    auto found = idle_.lower_bound(size);
    void* address = nullptr;
    if (found != idle_.end() && found->first <= size + size / 4) {
      address = found->second;
      idle_.erase(found);
    } else {
      address = std::aligned_alloc(64, size);
      TORCH_CHECK(address, "no memory to pin: ", size, " bytes");
      pieces_[static_cast<char*>(address)] = Piece{size};
    }
    return {address, address, &PinnedAllocator::free, c10::Device(c10::kCPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &PinnedAllocator::free; }
  void copy_data(void* to, const void* from, size_t bytes) const override { std::memcpy(to, from, bytes); }
  bool record_event(void* ptr, void*, c10::Stream stream) override {
    return use(ptr, Machine::get().end(stream));
  }
  void empty_cache() override {
    std::lock_guard<std::mutex> lock(mutex_);
    look_at_freed();
    for (auto& [size, address] : idle_) {
      pieces_.erase(static_cast<char*>(address));
      std::free(address);
    }
    idle_.clear();
  }
  at::HostStats get_stats() override { return {}; }
  void reset_accumulated_stats() override {}
  void reset_peak_stats() override {}

  bool use(const void* address, Point point) {
    std::lock_guard<std::mutex> lock(mutex_);
    auto piece = find(address);
    if (piece == pieces_.end()) return false;
    auto& users = piece->second.users;
    for (auto& user : users) {
      if (user.queue == point.queue) {
        user.count = std::max(user.count, point.count);
        return true;
      }
    }
    users.push_back(point);
    return true;
  }
  bool holds(const void* address) {
    std::lock_guard<std::mutex> lock(mutex_);
    return find(address) != pieces_.end();
  }

 private:
  std::map<char*, Piece>::iterator find(const void* address) {
    auto* at = static_cast<char*>(const_cast<void*>(address));
    auto next = pieces_.upper_bound(at);
    if (next == pieces_.begin()) return pieces_.end();
    auto piece = std::prev(next);
    return at < piece->first + piece->second.size ? piece : pieces_.end();
  }
  void look_at_freed() {
    for (auto at = freed_.begin(); at != freed_.end();) {
      auto& piece = pieces_.at(*at);
      bool passed = true;
      for (auto& point : piece.users) passed = passed && Machine::get().passed(point);
      if (!passed) {
        ++at;
        continue;
      }
      piece.users.clear();
      std::memset(*at, 0xFF, piece.size);
      idle_.insert({piece.size, *at});
      at = freed_.erase(at);
    }
  }
  static void free(void* address);

  std::mutex mutex_;
  std::map<char*, Piece> pieces_;
  std::list<char*> freed_;
  std::multimap<size_t, void*> idle_;
};

PinnedAllocator& pinned() {
  static PinnedAllocator* one = new PinnedAllocator();
  return *one;
}

void PinnedAllocator::free(void* address) {
  if (!address) return;
  auto& self = pinned();
  std::lock_guard<std::mutex> lock(self.mutex_);
  self.freed_.push_back(static_cast<char*>(address));
}

struct Register {
  Register() {
    c10::SetAllocator(c10::kPrivateUse1, &allocator());
    at::setHostAllocator(c10::kPrivateUse1, &pinned());
  }
} const g_register;

}  // namespace

c10::DeviceAllocator& device_allocator() { return allocator(); }

void* kernel_address(const void* address) {
  auto& space = AddressSpace::get();
  auto* at = static_cast<char*>(const_cast<void*>(address));
  return space.holds(at) ? space.real + (at - space.seen) : at;
}

bool is_device_address(const void* address) { return AddressSpace::get().holds(address); }

c10::DeviceIndex device_of_address(const void* address) {
  TORCH_CHECK(is_device_address(address), "an address of no simulated device");
  return c10::DeviceIndex((static_cast<const char*>(address) - AddressSpace::get().seen) / ptrdiff_t(kRange));
}

void hold_pool(int64_t pool) { allocator().hold(pool); }
void release_pool(int64_t pool) { allocator().release(pool); }

void set_capacity(c10::DeviceIndex device, int64_t bytes) { allocator().set_cap(device, size_t(bytes)); }
int64_t capacity(c10::DeviceIndex device) { return int64_t(allocator().cap(device)); }
bool is_pinned(const void* address) { return pinned().holds(address); }
void pinned_in_use(const void* address, Point point) { pinned().use(address, point); }

}  // namespace simdev
