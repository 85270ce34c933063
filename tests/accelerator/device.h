// A device made of the CPU. Tensors are in the host's memory, kernels are the CPU's, and streams are queues of tasks that
// run only while the host waits, in an order that a seed decides: no threads, no clock, so what is seen once is seen again.
#pragma once
#include <ATen/ATen.h>
#include <c10/core/Stream.h>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

namespace ours {

constexpr auto kDevice = c10::DeviceType::PrivateUse1;
constexpr double kLaunch = 1, kKernel = 4, kCollective = 40; // microseconds of a clock that counts, and never looks

struct Marker { // a point in a stream's queue
  bool reached = false;
  double time = 0; // at which an undisturbed device would reach it
  bool is_captured = false; // in a graph: it is never reached, only those of replays are
};
using Mark = std::shared_ptr<Marker>;

std::recursive_mutex& device_lock(); // held for a moment, and while a task runs; never where Python may run
c10::Stream current_stream(c10::DeviceIndex device); // the current device if it is negative
c10::Stream new_stream(c10::DeviceIndex device);
void enqueue(c10::Stream stream, const std::string& name, std::function<void()> task, bool is_collective = false);
Mark mark(c10::Stream stream);
void wait_for(c10::Stream stream, const Mark& mark); // the stream waits, not the host
bool poll(const Mark& mark); // the device goes on a little
void run_until(const Mark& mark); // the host waits, for a reason of this device alone
void host_wait(const Mark& mark, const char* why); // the host waits: counted
void wait_for_all(); // all devices
void use_pinned(const void* data, const Mark& until);
bool is_pinned(const void* data);
void record_use(const void* data, c10::Stream stream);
at::Allocator* memory_of_device();
at::Generator& default_generator(c10::DeviceIndex device);

struct View { // what a kernel is given of a tensor: memory, without a reference that would keep it, as on a GPU
  void* base = nullptr;
  size_t bytes = 0;
  std::vector<int64_t> sizes, strides;
  int64_t offset = 0;
  c10::ScalarType dtype = c10::kFloat;
  bool is_number = false, is_conj = false, is_neg = false;
};
View view_of(const at::Tensor& tensor);
at::Tensor on_cpu(const View& view); // a CPU tensor of the same memory
inline bool is_ours(const at::Tensor& t) { return t.defined() && t.device().type() == kDevice; }

} // namespace ours
