// The process group of simulated devices: NCCL's order of work, by gloo.
//
// An operation is a job on a stream of its communicator, behind what the caller's stream held at the call; `wait`
// puts the caller's stream behind it, and the host goes on. The streams of communicators run by themselves
// (queues.h). As in NCCL a group that is bound to a device has one communicator, any other has one for its
// collectives and batches and one for each pair of ranks, made when both sides come to it. Tags are ignored:
// messages of a communicator match by their order.
//
// Nothing keeps an operation's tensors, so whoever frees or writes one before `wait` is found. NCCL itself keeps
// them until `wait` or the end of the operation: it forgives what this does not.
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>
#include <torch/library.h>

#include <ATen/ops/div.h>

#include <numeric>

#include "images.h"
#include "queues.h"

namespace simdev {

namespace {

using Tensors = std::vector<at::Tensor>;
using Work = c10::intrusive_ptr<c10d::Work>;
using Begin = std::function<std::vector<Work>()>;

class StreamWork final : public c10d::Work {
 public:
  StreamWork(int rank, c10d::OpType type, c10::Stream stream, Point point)
      : c10d::Work(rank, type), stream_(stream), point_(point) {}

  bool isCompleted() override { return Machine::get().poll(point_); }
  bool isSuccess() const override { return true; }
  void synchronize() override { wait(kNoTimeout); }
  bool wait(std::chrono::milliseconds) override {
    if (retrieveOpType() == c10d::OpType::BARRIER) {
      Machine::get().finish(point_, "barrier");
    } else {
      Machine::get().wait(current_stream(stream_.device_index()), point_);
    }
    return true;
  }

 private:
  c10::Stream stream_;
  Point point_;
};

Tensors images(const Tensors& tensors) {
  Tensors found;
  for (auto& tensor : tensors) found.push_back(raw_image(tensor));
  return found;
}

Tensors flat(const std::vector<Tensors>& lists) {
  Tensors found;
  for (auto& list : lists) found.insert(found.end(), list.begin(), list.end());
  return found;
}

class Group final : public c10d::Backend {
 public:
  Group(c10::intrusive_ptr<c10d::Backend> gloo, c10::intrusive_ptr<c10d::Store> store)
      : c10d::Backend(gloo->getRank(), gloo->getSize()), gloo_(std::move(gloo)), store_(std::move(store)) {}

  const std::string getBackendName() const override { return "simccl"; }
  bool supportsCoalescing() const override { return true; }
  bool supportsSplitting() const override { return true; }
  c10::intrusive_ptr<Options> getBackendOptions() override { return gloo_->getBackendOptions(); }
  void setSequenceNumberForGroup() override {}
  uint64_t getSequenceNumberForGroup() override { return 0; }
  void eagerConnectSingleDevice(at::Device device) override { communicator("all", device.index()); }

  c10::intrusive_ptr<Backend> split(
      const c10::intrusive_ptr<c10d::Store>& store, const std::vector<int>& ranks,
      const c10::intrusive_ptr<Options>&) override {
    // The group's own gloo is split over the same store; it counts its ranks by its options, which groups share.
    auto own = c10::make_intrusive<c10d::PrefixStore>("simccl", store);
    auto options = gloo_->getBackendOptions();
    options->global_ranks_in_group.resize(size_t(getSize()));
    std::iota(options->global_ranks_in_group.begin(), options->global_ranks_in_group.end(), 0);
    auto inner = gloo_->split(own, ranks, options);
    return inner ? c10::make_intrusive<Group>(inner, own) : c10::intrusive_ptr<Group>();
  }

  // ---- messages

  Work send(Tensors& tensors, int peer, int) override {
    const bool pair = is_pair();
    return add(c10d::OpType::SEND, pair ? pair_with(peer) : "all", tensors, true, [=, gloo = gloo_, t = images(tensors)]() mutable {
      return std::vector<Work>{gloo->send(t, peer, pair ? 0 : 1)};
    });
  }
  Work recv(Tensors& tensors, int peer, int) override {
    const bool pair = is_pair();
    return add(c10d::OpType::RECV, pair ? pair_with(peer) : "all", tensors, true, [=, gloo = gloo_, t = images(tensors)]() mutable {
      return std::vector<Work>{gloo->recv(t, peer, pair ? 0 : 1)};
    });
  }

  // From here to `endCoalescing` operations are one job, whose parts all begin before one is waited for.
  void startCoalescing() override { batch_.emplace(); }
  Work endCoalescing() override {
    auto batch = std::move(*batch_);
    batch_.reset();
    if (batch.begins.empty()) return {};
    return add(c10d::OpType::COALESCED, "all", batch.tensors, batch.async, [begins = std::move(batch.begins)] {
      std::vector<Work> works;
      for (auto& begin : begins) {
        for (auto& work : begin()) works.push_back(work);
      }
      return works;
    });
  }

  // ---- collectives

  Work broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) override {
    return collective(c10d::OpType::BROADCAST, tensors, options, [=, gloo = gloo_, t = images(tensors)]() mutable {
      return gloo->broadcast(t, options);
    });
  }
  Work allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) override {
    return reduced(c10d::OpType::ALLREDUCE, tensors, images(tensors), options, [=, gloo = gloo_, t = images(tensors)](auto& o) mutable {
      return gloo->allreduce(t, o);
    });
  }
  Work allreduce_coalesced(Tensors& tensors, const c10d::AllreduceCoalescedOptions& options) override {
    return each(tensors.size(), options, [&](size_t i) {
      Tensors one{tensors[i]};
      allreduce(one, options);
    });
  }
  Work reduce(Tensors& tensors, const c10d::ReduceOptions& options) override {
    return reduced(c10d::OpType::REDUCE, tensors, images(tensors), options, [=, gloo = gloo_, t = images(tensors)](auto& o) mutable {
      return gloo->reduce(t, o);
    });
  }
  Work allgather(std::vector<Tensors>& outputs, Tensors& inputs, const c10d::AllgatherOptions& options) override {
    std::vector<Tensors> out{images(outputs.at(0))};
    return collective(c10d::OpType::ALLGATHER, inputs, options, [=, gloo = gloo_, in = images(inputs)]() mutable {
      return gloo->allgather(out, in, options);
    });
  }
  Work _allgather_base(at::Tensor& output, at::Tensor& input, const c10d::AllgatherOptions& options) override {
    return collective(
        c10d::OpType::_ALLGATHER_BASE, {output, input}, options,
        [=, gloo = gloo_, out = raw_image(output), in = raw_image(input)]() mutable {
          return gloo->_allgather_base(out, in, options);
        });
  }
  Work allgather_into_tensor_coalesced(
      Tensors& outputs, Tensors& inputs, const c10d::AllgatherOptions& options) override {
    return each(inputs.size(), options, [&](size_t i) { _allgather_base(outputs[i], inputs[i], options); });
  }
  Work reduce_scatter(
      Tensors& outputs, std::vector<Tensors>& inputs, const c10d::ReduceScatterOptions& options) override {
    std::vector<Tensors> in{images(inputs.at(0))};
    return reduced(
        c10d::OpType::REDUCE_SCATTER, outputs, images(outputs), options,
        [=, gloo = gloo_, out = images(outputs)](auto& o) mutable { return gloo->reduce_scatter(out, in, o); });
  }
  Work _reduce_scatter_base(
      at::Tensor& output, at::Tensor& input, const c10d::ReduceScatterOptions& options) override {
    return reduced(
        c10d::OpType::_REDUCE_SCATTER_BASE, {output, input}, {raw_image(output)}, options,
        [=, gloo = gloo_, out = raw_image(output), in = raw_image(input)](auto& o) mutable {
          return gloo->_reduce_scatter_base(out, in, o);
        });
  }
  Work reduce_scatter_tensor_coalesced(
      Tensors& outputs, Tensors& inputs, const c10d::ReduceScatterOptions& options) override {
    return each(inputs.size(), options, [&](size_t i) { _reduce_scatter_base(outputs[i], inputs[i], options); });
  }
  Work gather(std::vector<Tensors>& outputs, Tensors& inputs, const c10d::GatherOptions& options) override {
    std::vector<Tensors> out;
    for (auto& list : outputs) out.push_back(images(list));
    return collective(c10d::OpType::GATHER, inputs, options, [=, gloo = gloo_, in = images(inputs)]() mutable {
      return gloo->gather(out, in, options);
    });
  }
  Work scatter(Tensors& outputs, std::vector<Tensors>& inputs, const c10d::ScatterOptions& options) override {
    std::vector<Tensors> in;
    for (auto& list : inputs) in.push_back(images(list));
    return collective(c10d::OpType::SCATTER, outputs, options, [=, gloo = gloo_, out = images(outputs)]() mutable {
      return gloo->scatter(out, in, options);
    });
  }
  Work alltoall_base(
      at::Tensor& output, at::Tensor& input, std::vector<int64_t>& out_sizes, std::vector<int64_t>& in_sizes,
      const c10d::AllToAllOptions& options) override {
    return collective(
        c10d::OpType::ALLTOALL_BASE, {output, input}, options,
        [=, gloo = gloo_, out = raw_image(output), in = raw_image(input)]() mutable {
          return gloo->alltoall_base(out, in, out_sizes, in_sizes, options);
        });
  }
  // As NCCL's, `wait` makes the host wait.
  Work barrier(const c10d::BarrierOptions& options) override {
    const auto device = options.device.value_or(c10::Device(c10::kPrivateUse1, current_device()));
    return launch(c10d::OpType::BARRIER, "all", device, true, [gloo = gloo_] {
      return std::vector<Work>{gloo->barrier()};
    });
  }

 private:
  struct Batch {
    Tensors tensors;
    std::vector<Begin> begins;
    bool async = true;
  };

  bool is_pair() const { return !batch_ && !getBoundDeviceId(); }
  std::string pair_with(int peer) const {
    return std::to_string(std::min(getRank(), peer)) + ":" + std::to_string(std::max(getRank(), peer));
  }

  template <class Options, class Call>
  Work collective(c10d::OpType type, const Tensors& tensors, const Options& options, Call call) {
    return add(type, "all", tensors, options.asyncOp, [call]() mutable { return std::vector<Work>{call()}; });
  }

  // A collective with a reduction; gloo has no mean, which is the sum divided by the number of ranks.
  template <class Options, class Call>
  Work reduced(
      c10d::OpType type, const Tensors& tensors, const Tensors& results, Options options, Call call) {
    const bool mean = options.reduceOp == c10d::ReduceOp::AVG;
    if (mean) options.reduceOp = c10d::ReduceOp::SUM;
    return collective(type, tensors, options, [=, ranks = getSize()]() mutable {
      auto work = call(options);
      if (mean) {
        work->wait();
        for (auto& result : results) result.div_(ranks);
      }
      return work;
    });
  }

  template <class Options, class Call>
  Work each(size_t count, const Options& options, Call call) {
    startCoalescing();
    for (size_t i = 0; i < count; ++i) call(i);
    batch_->async = options.asyncOp;
    return endCoalescing();
  }

  Work add(c10d::OpType type, const std::string& key, const Tensors& tensors, bool async, Begin begin) {
    for (auto& tensor : tensors) {
      TORCH_CHECK(
          on_sim(tensor) && tensor.is_non_overlapping_and_dense(),
          "a group of simulated devices takes dense tensors of them, and not one on ", tensor.device());
    }
    if (batch_) {
      batch_->tensors.insert(batch_->tensors.end(), tensors.begin(), tensors.end());
      batch_->begins.push_back(std::move(begin));
      return {};
    }
    return launch(type, key, tensors.at(0).device(), async, std::move(begin));
  }

  Work launch(c10d::OpType type, const std::string& key, c10::Device device, bool async, Begin begin) {
    auto& machine = Machine::get();
    const auto stream = communicator(key, device.index()), caller = current_stream(device.index());
    machine.wait(stream, machine.end(caller));
    const Point done = machine.launch(stream, [begin = std::move(begin)] {
      for (auto& work : begin()) work->wait();
    });
    if (!async) machine.wait(caller, done);
    return c10::make_intrusive<StreamWork>(getRank(), type, stream, done);
  }

  // Returns the stream of a communicator. Where there is none yet its ranks wait here for each other.
  c10::Stream communicator(const std::string& key, c10::DeviceIndex device) {
    auto found = streams_.find({key, device});
    if (found != streams_.end()) return found->second;
    const auto colon = key.find(':');
    std::vector<std::string> meeting;
    for (int rank = 0; rank < getSize(); ++rank) {
      const bool inside = colon == std::string::npos || std::to_string(rank) == key.substr(0, colon) ||
          std::to_string(rank) == key.substr(colon + 1);
      if (inside) meeting.push_back(key + "/" + std::to_string(rank));
    }
    store_->set(key + "/" + std::to_string(getRank()), std::vector<uint8_t>{1});
    store_->wait(meeting);
    const auto stream = new_stream(device);
    Machine::get().run_by_itself(stream);
    streams_.insert({{key, device}, stream});
    return stream;
  }

  c10::intrusive_ptr<c10d::Backend> gloo_;
  c10::intrusive_ptr<c10d::Store> store_;
  std::map<std::pair<std::string, c10::DeviceIndex>, c10::Stream> streams_;
  std::optional<Batch> batch_;
};

}  // namespace

TORCH_LIBRARY_FRAGMENT(simdev, library) {
  // Adds to a group of gloo, which it works by, the one for simulated devices.
  library.def("add_group(__torch__.torch.classes.c10d.ProcessGroup group) -> ()", [](const c10::intrusive_ptr<c10d::ProcessGroup>& group) {
    group->setBackend(
        c10::kPrivateUse1, c10d::ProcessGroup::BackendType::CUSTOM,
        c10::make_intrusive<Group>(group->getBackend(c10::kCPU), group->getStore()));
  });
}

}  // namespace simdev
