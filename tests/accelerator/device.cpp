// Streams, memory, and what torch asks of a device.
#include "device.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/ThreadLocalState.h>
#include <ATen/core/CachingHostAllocator.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/csrc/utils/pybind.h>

#include <deque>
#include <map>
#include <optional>
#include <random>
#include <set>

namespace ours {

// Streams

struct Task {
  std::string name;
  std::function<void()> run;
  Mark awaited; // nothing is to be run: the stream waits
  int64_t collective = 0; // its number among those of this process, from 1: they run in one order on all ranks
};
struct Queue {
  int64_t stream;
  std::deque<Task> tasks;
  double busy_until = 0;
};
struct Range { // of a kernel, by the clock that counts
  int64_t device, stream;
  std::string name;
  double begin, end;
};
enum Last { kNone, kSide, kDefault };
struct Node { // of a captured graph: a task, or a mark
  int64_t stream;
  Task task;
  Mark made;
};
// A graph with the rules of CUDA's: a stream that waits for a captured mark is captured too, until all are joined.
struct Graph {
  int device;
  int64_t origin;
  std::set<int64_t> streams;
  std::vector<Node> nodes;
  std::map<Marker*, size_t> marks; // their nodes
  std::string error; // after which the capture is of no use
};

constexpr int kDevices = 4, kStreams = 32; // streams are handed out in turn, as CUDA's are
struct Runtime {
  std::recursive_mutex lock;
  std::map<std::pair<int, int64_t>, Queue> queues; // by device and stream
  int handed_out[kDevices] = {};
  int64_t collectives = 0;
  std::mt19937_64 order{0};
  Last last = kNone; // streams that run only when no other can
  double host_time = 0;
  bool traces = false;
  std::vector<Range> ranges;
  std::map<std::string, int64_t> host_waits;
  std::string error; // of a kernel: raised where the host waits next
  py::object* on_wait = nullptr;
  std::unique_ptr<Graph> capture; // under way
  std::map<int64_t, std::unique_ptr<Graph>> graphs;
  at::ThreadLocalState state; // of the import: kernels see no mode of the thread that happens to run them
};
static Runtime& runtime() {
  static auto* made = new Runtime; // never destroyed: tensors outlive it otherwise
  return *made;
}
using Guarded = std::lock_guard<std::recursive_mutex>;
std::recursive_mutex& device_lock() { return runtime().lock; }

static thread_local int current_device = 0;
static thread_local int64_t current_streams[kDevices] = {};
static int index_of(c10::DeviceIndex device) { return device < 0 ? current_device : device; }
static c10::Stream stream_at(int device, int64_t id) {
  return c10::Stream(c10::Stream::UNSAFE, c10::Device(kDevice, device), id);
}
c10::Stream current_stream(c10::DeviceIndex device) {
  return stream_at(index_of(device), current_streams[index_of(device)]);
}
c10::Stream new_stream(c10::DeviceIndex device) {
  Guarded guard(runtime().lock);
  return stream_at(index_of(device), 1 + runtime().handed_out[index_of(device)]++ % kStreams);
}
static Queue& queue_of(c10::Stream stream) {
  auto& queue = runtime().queues[{stream.device_index(), stream.id()}];
  queue.stream = stream.id();
  return queue;
}

static bool run_one() { // false if nothing can run
  auto& r = runtime();
  Guarded guard(r.lock);
  int64_t first = INT64_MAX;
  for (auto& [_, queue] : r.queues)
    for (auto& task : queue.tasks)
      if (task.collective) {
        first = std::min(first, task.collective);
        break;
      }
  std::vector<Queue*> ready, preferred;
  for (auto& [_, queue] : r.queues) {
    if (queue.tasks.empty())
      continue;
    auto& task = queue.tasks.front();
    if ((task.awaited && !task.awaited->reached) || (task.collective && task.collective != first))
      continue;
    ready.push_back(&queue);
    const bool is_last = (r.last == kSide && queue.stream) || (r.last == kDefault && !queue.stream);
    if (!is_last)
      preferred.push_back(&queue);
  }
  if (ready.empty())
    return false;
  auto& among = preferred.empty() ? ready : preferred;
  auto& tasks = among[r.order() % among.size()]->tasks;
  Task task = std::move(tasks.front());
  tasks.pop_front();
  if (task.run)
    try {
      at::ThreadLocalStateGuard clean(r.state);
      at::AutoDispatchBelowADInplaceOrView below;
      task.run();
    } catch (const c10::Error& error) {
      r.error = task.name + ": " + error.what_without_backtrace();
    } catch (const std::exception& error) {
      r.error = task.name + ": " + error.what();
    }
  return true;
}
static bool is_captured(int device, int64_t stream) {
  auto& capture = runtime().capture;
  return capture && capture->device == device && capture->streams.count(stream);
}
static bool is_captured(c10::Stream stream) { return is_captured(stream.device_index(), stream.id()); }
static void refuse(const std::string& what) {
  Guarded guard(runtime().lock);
  if (auto& capture = runtime().capture) {
    capture->error = what;
    TORCH_CHECK(false, "operation not permitted when stream is capturing: ", what);
  }
}
static void push(c10::Stream stream, Task task, double cost) {
  auto& r = runtime();
  Guarded guard(r.lock);
  if (is_captured(stream)) {
    r.capture->nodes.push_back({stream.id(), std::move(task), nullptr});
    return;
  }
  auto& queue = queue_of(stream);
  const double begin = std::max(queue.busy_until, r.host_time);
  if (cost) {
    queue.busy_until = begin + cost;
    r.host_time += kLaunch;
    if (r.traces)
      r.ranges.push_back({stream.device_index(), stream.id(), task.name, begin, queue.busy_until});
  }
  queue.tasks.push_back(std::move(task));
}
static void overwrite(c10::Stream stream);
void enqueue(c10::Stream stream, const std::string& name, std::function<void()> task, bool is_collective) {
  Guarded guard(runtime().lock);
  overwrite(stream);
  const int64_t number = is_collective ? ++runtime().collectives : 0;
  push(stream, {name, std::move(task), nullptr, number}, is_collective ? kCollective : kKernel);
}
Mark mark(c10::Stream stream) {
  Guarded guard(runtime().lock);
  auto made = std::make_shared<Marker>();
  if (is_captured(stream)) {
    made->is_captured = true;
    auto& capture = *runtime().capture;
    capture.marks[made.get()] = capture.nodes.size();
    capture.nodes.push_back({stream.id(), {"mark", nullptr, nullptr, 0}, made});
    return made;
  }
  push(stream, {"mark", [made] { made->reached = true; }, nullptr, 0}, 0);
  made->time = std::max(queue_of(stream).busy_until, runtime().host_time);
  return made;
}
void wait_for(c10::Stream stream, const Mark& mark) {
  Guarded guard(runtime().lock);
  auto& capture = runtime().capture;
  if (mark->is_captured) {
    TORCH_CHECK(capture && capture->marks.count(mark.get()), "an event of another capture is waited for");
    if (!stream.id())
      refuse("the default stream waits for captured work");
    capture->streams.insert(stream.id());
  } else if (is_captured(stream)) {
    refuse("a wait for work that is not captured");
  }
  push(stream, {"wait", nullptr, mark, 0}, 0);
  if (mark->is_captured)
    return;
  queue_of(stream).busy_until = std::max(queue_of(stream).busy_until, mark->time);
}
bool poll(const Mark& mark) {
  if (mark->is_captured)
    refuse("a query of a captured event");
  for (int i = 0; i < 4 && !mark->reached && run_one(); i++) {
  }
  return mark->reached;
}
void run_until(const Mark& mark) {
  if (mark->is_captured)
    refuse("a wait of the host for captured work");
  std::optional<pybind11::gil_scoped_release> no_gil;
  if (PyGILState_Check())
    no_gil.emplace();
  while (!mark->reached)
    TORCH_CHECK(run_one(), "the host waits for what nothing will reach");
  Guarded guard(runtime().lock);
  runtime().host_time = std::max(runtime().host_time, mark->time);
}
static void raise_error() {
  std::string error;
  {
    Guarded guard(runtime().lock);
    error.swap(runtime().error);
  }
  TORCH_CHECK(error.empty(), "a kernel failed: ", error);
}
static void note_wait(const char* why) {
  {
    Guarded guard(runtime().lock);
    runtime().host_waits[why]++;
  }
  if (runtime().on_wait) {
    py::gil_scoped_acquire gil;
    if (!runtime().on_wait->is_none())
      (*runtime().on_wait)(why);
  }
}
void host_wait(const Mark& mark, const char* why) {
  refuse(std::string("the host waits, ") + why);
  note_wait(why);
  run_until(mark);
  raise_error();
}
static void wait_for_device(int device) {
  std::vector<Mark> marks;
  {
    Guarded guard(runtime().lock);
    for (auto& [key, queue] : runtime().queues)
      if (key.first == device)
        marks.push_back(mark(stream_at(device, key.second)));
  }
  for (auto& each : marks)
    run_until(each);
}
void wait_for_all() {
  for (int device = 0; device < kDevices; device++)
    wait_for_device(device);
}

// Memory, of the device and pinned memory of the host: caches with the rules of CUDA's. A block that is freed belongs to
// its stream again at once, or when those are done for which it was recorded. It is overwritten there before the next
// kernel, as its next owner may do: so whoever still uses it, or reads before it writes, reads NaN.

constexpr int kHost = -1;
struct Block {
  char* data;
  size_t size;
  int device; // or kHost
  int64_t stream;
  std::set<int64_t> recorded;
  std::vector<Mark> uses;
  bool is_of_graph = false; // never anybody else's
};
struct Memory {
  std::map<std::tuple<int, int64_t, size_t>, std::vector<Block*>> idle;
  std::map<char*, Block*> live;
  std::vector<Block*> freed; // still in use
  std::map<std::pair<int, int64_t>, std::vector<Block*>> given_back; // since the last kernel of that stream
};
static Memory& memory() {
  static auto* made = new Memory;
  return *made;
}
static void overwrite(c10::Stream stream) {
  if (is_captured(stream))
    return;
  std::vector<Block*> blocks;
  blocks.swap(memory().given_back[{stream.device_index(), stream.id()}]);
  for (auto* block : blocks)
    push(stream, {"memory's next owner", [=] { memset(block->data, 0xff, block->size); }, nullptr, 0}, 0);
}
static void give_back(Block* block) {
  if (block->device == kHost)
    memset(block->data, 0xff, block->size);
  else
    memory().given_back[{block->device, block->stream}].push_back(block);
  memory().idle[{block->device, block->stream, block->size}].push_back(block);
}
static void give_back_unused() {
  auto& freed = memory().freed;
  for (size_t i = 0; i < freed.size();) {
    auto& uses = freed[i]->uses;
    if (std::all_of(uses.begin(), uses.end(), [](const Mark& use) { return use->reached; })) {
      uses.clear();
      give_back(freed[i]);
      freed.erase(freed.begin() + i);
    } else {
      i++;
    }
  }
}
static void free_block(void* data) {
  Guarded guard(runtime().lock);
  auto found = memory().live.find((char*)data);
  if (found == memory().live.end())
    return; // of no bytes
  Block* block = found->second;
  memory().live.erase(found);
  if (block->is_of_graph)
    return;
  for (int64_t stream : block->recorded)
    block->uses.push_back(mark(stream_at(block->device, stream)));
  block->recorded.clear();
  memory().freed.push_back(block);
  give_back_unused();
}
static void* allocate_block(size_t bytes, int device, int64_t stream) {
  if (!bytes)
    return nullptr;
  size_t size = 256;
  while (size < bytes)
    size *= 2;
  Guarded guard(runtime().lock);
  give_back_unused();
  if (device == kHost)
    refuse("pinned memory is allocated"); // which queries events
  const bool is_of_graph = device != kHost && is_captured(device, stream);
  auto& idle = memory().idle[{device, stream, size}];
  Block* block;
  if (idle.empty() || is_of_graph) {
    block = new Block{nullptr, size, device, stream, {}, {}, is_of_graph};
    TORCH_CHECK(posix_memalign((void**)&block->data, 64, size) == 0, "out of memory");
    memset(block->data, 0xff, size);
  } else {
    block = idle.back(); // the last freed first
    idle.pop_back();
    if (device != kHost)
      overwrite(stream_at(device, stream));
  }
  memory().live[block->data] = block;
  return block->data;
}
static Block* block_of(const void* data) { // also of an address within it
  auto after = memory().live.upper_bound((char*)data);
  if (after == memory().live.begin())
    return nullptr;
  Block* block = std::prev(after)->second;
  return (char*)data < block->data + block->size ? block : nullptr;
}
void record_use(const void* data, c10::Stream stream) {
  Guarded guard(runtime().lock);
  Block* block = block_of(data);
  if (block && block->stream != stream.id())
    block->recorded.insert(stream.id());
}
bool is_pinned(const void* data) {
  Guarded guard(runtime().lock);
  Block* block = block_of(data);
  return block && block->device == kHost;
}
void use_pinned(const void* data, const Mark& until) {
  Guarded guard(runtime().lock);
  block_of(data)->uses.push_back(until);
}

struct DeviceMemory final : c10::DeviceAllocator {
  c10::DataPtr allocate(size_t bytes) override {
    void* data = allocate_block(bytes, current_device, current_streams[current_device]);
    return {data, data, &free_block, c10::Device(kDevice, current_device)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &free_block; }
  void copy_data(void* to, const void* from, size_t bytes) const override {
    enqueue(current_stream(-1), "copy", [=] { memcpy(to, from, bytes); });
  }
  bool initialized() override { return true; }
  void emptyCache(c10::MempoolId_t) override {}
  void recordStream(const c10::DataPtr& data, c10::Stream stream) override { record_use(data.get(), stream); }
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex) override { return {}; }
  void resetAccumulatedStats(c10::DeviceIndex) override {}
  void resetPeakStats(c10::DeviceIndex) override {}
};
struct PinnedMemory final : at::HostAllocator {
  c10::DataPtr allocate(size_t bytes) override {
    void* data = allocate_block(bytes, kHost, 0);
    return {data, data, &free_block, c10::Device(c10::kCPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &free_block; }
  void copy_data(void* to, const void* from, size_t bytes) const override { memcpy(to, from, bytes); }
  bool record_event(void* data, void*, c10::Stream stream) override {
    if (is_pinned(data))
      use_pinned(data, mark(stream));
    return is_pinned(data);
  }
  void empty_cache() override {}
  at::HostStats get_stats() override { return {}; }
  void reset_accumulated_stats() override {}
  void reset_peak_stats() override {}
};
static DeviceMemory* device_memory() {
  static auto* made = new DeviceMemory;
  return made;
}
at::Allocator* memory_of_device() { return device_memory(); }

// torch's streams and events

struct Guard final : c10::impl::DeviceGuardImplInterface {
  static constexpr c10::DeviceType static_type = kDevice;
  Guard() = default;
  explicit Guard(c10::DeviceType) {}
  c10::DeviceType type() const override { return kDevice; }
  c10::Device getDevice() const override { return {kDevice, (c10::DeviceIndex)current_device}; }
  c10::Device exchangeDevice(c10::Device device) const override {
    auto before = getDevice();
    setDevice(device);
    return before;
  }
  void setDevice(c10::Device device) const override {
    TORCH_CHECK(device.index() < kDevices, "there is no device ", (int)device.index());
    uncheckedSetDevice(device);
  }
  void uncheckedSetDevice(c10::Device device) const noexcept override {
    if (device.index() >= 0)
      current_device = device.index();
  }
  c10::DeviceCapability getDeviceCapability(c10::Device) const override { return {}; }
  c10::DeviceIndex deviceCount() const noexcept override { return kDevices; }
  c10::Stream getStream(c10::Device device) const override { return current_stream(device.index()); }
  c10::Stream getDefaultStream(c10::Device device) const override { return stream_at(index_of(device.index()), 0); }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool) const override { return new_stream(device.index()); }
  c10::Stream getNewStream(c10::Device device, int) const override { return new_stream(device.index()); }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    auto before = current_stream(stream.device_index());
    current_streams[stream.device_index()] = stream.id();
    return before;
  }
  // An event is the last mark that it has recorded.
  void record(void** event, const c10::Stream& stream, const c10::DeviceIndex, const c10::EventFlag) const override {
    destroyEvent(*event, 0);
    *event = new Mark(mark(stream));
  }
  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override { delete (Mark*)event; }
  void block(void* event, const c10::Stream& stream) const override {
    if (event)
      wait_for(stream, *(Mark*)event);
  }
  bool queryEvent(void* event) const override { return !event || poll(*(Mark*)event); }
  void synchronizeEvent(void* event) const override {
    if (event)
      host_wait(*(Mark*)event, "event");
  }
  double elapsedTime(void* begin, void* end, const c10::DeviceIndex) const override {
    return ((*(Mark*)end)->time - (*(Mark*)begin)->time) / 1e3;
  }
  bool queryStream(const c10::Stream& stream) const override { return poll(mark(stream)); }
  void synchronizeStream(const c10::Stream& stream) const override { host_wait(mark(stream), "stream"); }
  void synchronizeDevice(const c10::DeviceIndex device) const override {
    refuse("the host waits, device");
    note_wait("device");
    wait_for_device(index_of(device));
    raise_error();
  }
  void recordDataPtrOnStream(const c10::DataPtr& data, const c10::Stream& stream) const override {
    record_use(data.get(), stream);
  }
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);
REGISTER_ALLOCATOR(c10::DeviceType::PrivateUse1, device_memory());

struct Generator final : at::CPUGeneratorImpl { // which draws the CPU's numbers
  explicit Generator(int device) {
    device_ = c10::Device(kDevice, device);
    key_set_ = c10::DispatchKeySet(c10::DispatchKey::PrivateUse1);
  }
};
at::Generator& default_generator(c10::DeviceIndex device) {
  static auto* made = [] {
    auto* all = new std::vector<at::Generator>;
    for (int i = 0; i < kDevices; i++)
      all->push_back(at::make_generator<Generator>(i));
    return all;
  }();
  return (*made)[index_of(device)];
}
struct Hooks final : at::PrivateUse1HooksInterface {
  void init() const override {}
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  c10::DeviceIndex deviceCount() const override { return kDevices; }
  void setCurrentDevice(c10::DeviceIndex device) const override { Guard().setDevice({kDevice, device}); }
  c10::DeviceIndex getCurrentDevice() const override { return current_device; }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex device) const override {
    return Guard().exchangeDevice({kDevice, device}).index();
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex device) const override { return exchangeDevice(device); }
  at::Allocator* getPinnedMemoryAllocator() const override {
    static auto* made = new PinnedMemory;
    return made;
  }
  bool isPinnedPtr(const void* data) const override { return is_pinned(data); }
  at::Device getDeviceFromPtr(void*) const override { return {kDevice, (c10::DeviceIndex)current_device}; }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex device) const override { return default_generator(device); }
  at::Generator getNewGenerator(c10::DeviceIndex device) const override {
    return at::make_generator<Generator>(index_of(device));
  }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t bytes) const override {
    auto* impl = storage.unsafeGetStorageImpl();
    c10::DeviceGuard guard(impl->device());
    auto data = device_memory()->allocate(bytes);
    if (const size_t n = std::min(bytes, impl->nbytes()))
      device_memory()->copy_data(data.get(), impl->data(), n);
    impl->set_data_ptr_noswap(std::move(data));
    impl->set_nbytes(bytes);
  }
};

// Graphs

static void capture_begin() {
  Guarded guard(runtime().lock);
  const auto stream = current_stream(-1);
  TORCH_CHECK(!runtime().capture, "a capture is under way");
  TORCH_CHECK(stream.id(), "the default stream cannot be captured");
  runtime().capture.reset(new Graph{stream.device_index(), stream.id(), {stream.id()}, {}, {}, ""});
}
static int64_t capture_end() {
  Guarded guard(runtime().lock);
  auto graph = std::move(runtime().capture);
  TORCH_CHECK(graph, "no capture is under way");
  TORCH_CHECK(graph->error.empty(), "the capture was invalidated: ", graph->error);
  std::set<size_t> joined;
  std::vector<size_t> open;
  for (size_t i = graph->nodes.size(); i-- > 0 && open.empty();)
    if (graph->nodes[i].stream == graph->origin)
      open.push_back(i);
  while (!open.empty()) {
    const size_t i = open.back();
    open.pop_back();
    if (!joined.insert(i).second)
      continue;
    const auto& node = graph->nodes[i];
    if (node.task.awaited)
      open.push_back(graph->marks.at(node.task.awaited.get()));
    for (size_t before = i; before-- > 0;)
      if (graph->nodes[before].stream == node.stream) {
        open.push_back(before);
        break;
      }
  }
  for (size_t i = 0; i < graph->nodes.size(); i++)
    TORCH_CHECK(
        joined.count(i) || !graph->nodes[i].task.run, "a captured stream is not joined: ", graph->nodes[i].task.name);
  const int64_t number = runtime().graphs.empty() ? 1 : runtime().graphs.rbegin()->first + 1;
  runtime().graphs[number] = std::move(graph);
  return number;
}
// A launch waits for its stream, and its stream for all of it; streams of the graph are not those of the host's tasks.
static void replay(int64_t number) {
  Guarded guard(runtime().lock);
  refuse("a replay");
  const auto& graph = *runtime().graphs.at(number);
  const auto launched = current_stream(graph.device);
  for (auto& [key, _] : memory().given_back)
    overwrite(stream_at(key.first, key.second));
  const auto own = [&](int64_t stream) { return stream_at(graph.device, 1000 * number + stream); };
  const auto begin = mark(launched);
  for (int64_t stream : graph.streams)
    wait_for(own(stream), begin);
  std::map<Marker*, Mark> marks;
  for (const auto& node : graph.nodes) {
    if (node.made)
      marks[node.made.get()] = mark(own(node.stream));
    else if (node.task.awaited)
      wait_for(own(node.stream), marks.at(node.task.awaited.get()));
    else
      push(own(node.stream), {node.task.name, node.task.run, nullptr, node.task.collective ? ++runtime().collectives : 0}, 0);
  }
  for (int64_t stream : graph.streams)
    wait_for(launched, mark(own(stream)));
}

void bind_collectives(py::module& m);

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  at::RegisterPrivateUse1HooksInterface(new Hooks);
  runtime();
  m.def("start", [] { at::globalContext().lazyInitDevice(kDevice); });
  m.def("device_count", [] { return kDevices; });
  m.def("current_device", [] { return current_device; });
  m.def("set_device", [](int device) { Guard().setDevice({kDevice, (c10::DeviceIndex)device}); });
  m.def("default_generator", [](int device) { return default_generator(device); });
  m.def("synchronize", [](int device) { Guard().synchronizeDevice(device); });
  m.def("wait_for_all", [] {
    wait_for_all();
    raise_error();
  });
  m.def("configure", [](int64_t seed, const std::string& last) {
    wait_for_all();
    Guarded guard(runtime().lock);
    runtime().error.clear();
    runtime().order.seed(seed);
    runtime().last = last == "side" ? kSide : last == "default" ? kDefault : kNone;
  });
  m.def("on_wait", [](py::object call) { runtime().on_wait = new py::object(std::move(call)); });
  m.def("trace", [](bool traces) {
    Guarded guard(runtime().lock);
    py::list found;
    for (const auto& each : runtime().ranges)
      found.append(py::make_tuple(each.name, each.stream, each.begin, each.end));
    runtime().ranges.clear();
    runtime().traces = traces;
    return found;
  });
  m.def("is_capturing", [] { return is_captured(current_stream(-1)); });
  m.def("capture_begin", &capture_begin);
  m.def("capture_end", &capture_end);
  m.def("replay", &replay);
  bind_collectives(m);
}

} // namespace ours
