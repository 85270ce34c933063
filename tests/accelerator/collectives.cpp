// A backend of torch.distributed with the rules of NCCL's: a stream for each group, waits of streams and not of the
// host. What moves bytes is gloo, on the memory of the tensors.
#include "device.h"

#include <ATen/core/ivalue.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/StreamGuard.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Work.hpp>
#include <torch/csrc/utils/pybind.h>

#include <pybind11/chrono.h>
#include <deque>

namespace ours {
using at::Tensor;
using Tensors = std::vector<Tensor>;
using Running = c10::intrusive_ptr<c10d::Work>;
using c10d::OpType;

struct Kept { // what a collective uses, until a stream of the caller has waited for it, or it is over
  Mark end;
  Tensors tensors;
};

struct DeviceWork final : c10d::Work {
  DeviceWork(int rank, OpType type, std::shared_ptr<Kept> kept, Tensors outputs, bool blocks)
      : Work(rank, type), kept(std::move(kept)), outputs(std::move(outputs)), blocks(blocks) {}
  bool isCompleted() override { return poll(kept->end); }
  bool isSuccess() const override { return kept->end->reached; }
  void synchronize() override {
    wait_for(current_stream(-1), kept->end);
    Tensors().swap(kept->tensors);
  }
  bool wait(std::chrono::milliseconds timeout) override {
    synchronize();
    if (blocks || timeout != kNoTimeout)
      host_wait(kept->end, blocks ? "barrier" : "collective with a timeout");
    return true;
  }
  void blockCurrentStream() override { synchronize(); }
  Tensors result() override { return outputs; }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override { return future; }

  std::shared_ptr<Kept> kept;
  Tensors outputs;
  bool blocks;
  c10::intrusive_ptr<c10::ivalue::Future> future;
};

static Tensors flat(const std::vector<Tensors>& lists) {
  Tensors all;
  for (const auto& list : lists)
    all.insert(all.end(), list.begin(), list.end());
  return all;
}
static std::vector<Tensors> in_lists(const Tensors& all, size_t n) {
  std::vector<Tensors> lists;
  for (size_t i = 0; i < all.size(); i += n)
    lists.emplace_back(all.begin() + i, all.begin() + i + n);
  return lists;
}
static std::vector<View> views_of(const Tensors& tensors) {
  std::vector<View> made;
  for (const auto& t : tensors) {
    TORCH_CHECK(is_ours(t), "tensors of a collective must be on the device, not on ", t.device());
    TORCH_CHECK(t.is_non_overlapping_and_dense(), "tensors of a collective must be contiguous");
    made.push_back(view_of(t));
  }
  return made;
}
static Tensors on_cpu(const std::vector<View>& views) {
  Tensors made;
  for (const auto& each : views)
    made.push_back(on_cpu(each));
  return made;
}

struct Backend final : c10d::Backend {
  struct Options final : c10d::Backend::Options {
    explicit Options(std::chrono::milliseconds timeout) : c10d::Backend::Options("simccl", timeout) {}
  };
  Backend(c10::intrusive_ptr<c10d::Backend> gloo, std::chrono::milliseconds timeout)
      : c10d::Backend(gloo->getRank(), gloo->getSize()), gloo(gloo), options(c10::make_intrusive<Options>(timeout)) {}

  const std::string getBackendName() const override { return "simccl"; }
  c10::intrusive_ptr<c10d::Backend::Options> getBackendOptions() override { return options; }
  void setTimeout(std::chrono::milliseconds timeout) override { gloo->setTimeout(options->timeout = timeout); }
  bool supportsCoalescing() const override { return false; }
  void setSequenceNumberForGroup() override {}
  uint64_t getSequenceNumberForGroup() override { return sequence; }
  void abort() override { gloo->abort(); }
  void shutdown() override {
    wait_for_all(); // what other ranks still wait for
    gloo->shutdown();
  }

  // Run `work` with CPU tensors on the stream of this group, behind what the current stream has been given.
  Running start(
      OpType type, const Tensors& in, const Tensors& out, std::function<Running(Tensors, Tensors)> work,
      bool blocks = false, bool averages = false) {
    const auto device = (in.empty() ? out : in).at(0).device();
    sequence++;
    if (!stream || stream->device() != device)
      stream = new_stream(device.index());
    wait_for(*stream, mark(current_stream(device.index())));
    enqueue(*stream, "collective " + c10d::opTypeToString(type), [=, in = views_of(in), out = views_of(out)] {
      auto results = on_cpu(out);
      work(on_cpu(in), results)->wait();
      if (averages)
        for (auto& t : results)
          t.div_(getSize());
    }, true);
    auto kept = std::make_shared<Kept>(Kept{mark(*stream), flat({in, out})});
    auto made = c10::make_intrusive<DeviceWork>(getRank(), type, kept, out, blocks);
    c10::StreamGuard on(*stream); // a future is complete when this stream is
    made->future = c10::make_intrusive<c10::ivalue::Future>(
        c10::ListType::create(c10::TensorType::get()), std::vector<c10::Device>{device});
    made->future->markCompleted(c10::IValue(out));
    open.push_back(kept);
    while (open.front()->end->reached)
      open.pop_front();
    return made;
  }
  template <typename Given>
  static std::pair<Given, bool> summed(Given options) { // gloo does not average everything
    const bool averages = options.reduceOp == c10d::ReduceOp::AVG;
    if (averages)
      options.reduceOp = c10d::ReduceOp::SUM;
    return {options, averages};
  }

  Running broadcast(Tensors& t, const c10d::BroadcastOptions& o) override {
    return start(OpType::BROADCAST, {}, t, [g = gloo, o](Tensors, Tensors out) { return g->broadcast(out, o); });
  }
  Running allreduce(Tensors& t, const c10d::AllreduceOptions& given) override {
    const auto [o, averages] = summed(given);
    auto work = [g = gloo, o = o](Tensors, Tensors out) { return g->allreduce(out, o); };
    return start(OpType::ALLREDUCE, {}, t, work, false, averages);
  }
  Running allgather(std::vector<Tensors>& out, Tensors& in, const c10d::AllgatherOptions& o) override {
    auto work = [g = gloo, o, n = out.at(0).size()](Tensors in, Tensors out) {
      auto lists = in_lists(out, n);
      return g->allgather(lists, in, o);
    };
    return start(OpType::ALLGATHER, in, flat(out), work);
  }
  Running _allgather_base(Tensor& out, Tensor& in, const c10d::AllgatherOptions& o) override {
    auto work = [g = gloo, o](Tensors in, Tensors out) { return g->_allgather_base(out[0], in[0], o); };
    return start(OpType::_ALLGATHER_BASE, {in}, {out}, work);
  }
  Running _reduce_scatter_base(Tensor& out, Tensor& in, const c10d::ReduceScatterOptions& given) override {
    const auto [o, averages] = summed(given);
    auto work = [g = gloo, o = o](Tensors in, Tensors out) {
      auto copy = in[0].clone(); // gloo writes over it
      auto running = g->_reduce_scatter_base(out[0], copy, o);
      running->wait();
      return running;
    };
    return start(OpType::_REDUCE_SCATTER_BASE, {in}, {out}, work, false, averages);
  }
  Running gather(std::vector<Tensors>& out, Tensors& in, const c10d::GatherOptions& o) override {
    auto work = [g = gloo, o](Tensors in, Tensors out) {
      auto lists = in_lists(out, std::max<size_t>(out.size(), 1));
      return g->gather(lists, in, o);
    };
    return start(OpType::GATHER, in, flat(out), work);
  }
  Running scatter(Tensors& out, std::vector<Tensors>& in, const c10d::ScatterOptions& o) override {
    auto work = [g = gloo, o](Tensors in, Tensors out) {
      auto lists = in_lists(in, std::max<size_t>(in.size(), 1));
      return g->scatter(out, lists, o);
    };
    return start(OpType::SCATTER, flat(in), out, work);
  }
  Running alltoall_base(
      Tensor& out, Tensor& in, std::vector<int64_t>& to, std::vector<int64_t>& from, const c10d::AllToAllOptions& o)
      override {
    auto work = [g = gloo, o, to, from](Tensors in, Tensors out) mutable {
      return g->alltoall_base(out[0], in[0], to, from, o);
    };
    return start(OpType::ALLTOALL_BASE, {in}, {out}, work);
  }
  // Of several: one after the other, and the last is waited for.
  Running allreduce_coalesced(Tensors& all, const c10d::AllreduceCoalescedOptions& o) override {
    Running last;
    for (auto& each : all) {
      Tensors one{each};
      last = allreduce(one, o);
    }
    return last;
  }
  Running allgather_into_tensor_coalesced(Tensors& out, Tensors& in, const c10d::AllgatherOptions& o) override {
    Running last;
    for (size_t i = 0; i < in.size(); i++)
      last = _allgather_base(out[i], in[i], o);
    return last;
  }
  Running reduce_scatter_tensor_coalesced(Tensors& out, Tensors& in, const c10d::ReduceScatterOptions& o) override {
    Running last;
    for (size_t i = 0; i < in.size(); i++)
      last = _reduce_scatter_base(out[i], in[i], o);
    return last;
  }
  Running barrier(const c10d::BarrierOptions&) override {
    const Tensors one{at::zeros({1}, at::TensorOptions().device(kDevice))};
    return start(OpType::BARRIER, {}, one, [g = gloo](Tensors, Tensors out) { return g->allreduce(out); }, true);
  }

  c10::intrusive_ptr<c10d::Backend> gloo;
  c10::intrusive_ptr<Options> options;
  std::optional<c10::Stream> stream;
  std::deque<std::shared_ptr<Kept>> open; // so that memory lives while a collective runs, also if nobody waits
  uint64_t sequence = 0;
};

void bind_collectives(py::module& m) {
  m.def("create_backend", [](c10::intrusive_ptr<c10d::Backend> gloo, double seconds) -> c10::intrusive_ptr<c10d::Backend> {
    return c10::make_intrusive<Backend>(std::move(gloo), std::chrono::milliseconds((int64_t)(seconds * 1000)));
  });
}
} // namespace ours
