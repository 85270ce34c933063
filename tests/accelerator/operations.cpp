// Operations: shapes of results from torch's meta device, and then the CPU's kernel, in the order of the stream.
#include "device.h"

#include <ATen/EmptyTensor.h>
#include <ATen/autocast_mode.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/Resize.h>
#include <ATen/native/TensorFactories.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_native.h>
#include <torch/library.h>

#include <iomanip>
#include <map>
#include <set>
#include <sstream>

namespace ours {

View view_of(const at::Tensor& t) {
  return {
      t.storage().unsafeGetStorageImpl()->mutable_data(), t.storage().nbytes(), t.sizes().vec(), t.strides().vec(),
      t.storage_offset(), t.scalar_type(), t.unsafeGetTensorImpl()->is_wrapped_number(), t.is_conj(), t.is_neg()};
}
at::Tensor on_cpu(const View& v) {
  c10::DataPtr data(v.base, c10::Device(c10::kCPU));
  c10::Storage storage(c10::Storage::use_byte_size_t(), v.bytes, std::move(data), nullptr, false);
  auto t = at::detail::make_tensor<c10::TensorImpl>(
      std::move(storage), c10::DispatchKeySet(c10::DispatchKey::CPU), c10::scalarTypeToTypeMeta(v.dtype));
  t.unsafeGetTensorImpl()->set_sizes_and_strides(v.sizes, v.strides, v.offset);
  if (v.is_number)
    t.unsafeGetTensorImpl()->set_wrapped_number(true);
  if (v.is_conj)
    t._set_conj(true);
  if (v.is_neg)
    t._set_neg(true);
  return t;
}

// Memory and views

static void require_plain(std::optional<c10::Layout> layout, std::optional<bool> pin) {
  TORCH_CHECK(c10::layout_or_default(layout) == c10::kStrided, "only strided tensors are made on this device");
  TORCH_CHECK(!pin.value_or(false), "only the host's memory can be pinned");
}
constexpr c10::DispatchKeySet kKeys(c10::DispatchKey::PrivateUse1);
static at::Tensor empty(
    c10::IntArrayRef size, std::optional<c10::ScalarType> dtype, std::optional<c10::Layout> layout,
    std::optional<c10::Device> device, std::optional<bool> pin, std::optional<c10::MemoryFormat> format) {
  require_plain(layout, pin);
  c10::DeviceGuard guard(device.value_or(c10::Device(kDevice)));
  return at::detail::empty_generic(size, memory_of_device(), kKeys, c10::dtype_or_default(dtype), format);
}
static at::Tensor empty_strided(
    c10::IntArrayRef size, c10::IntArrayRef stride, std::optional<c10::ScalarType> dtype,
    std::optional<c10::Layout> layout, std::optional<c10::Device> device, std::optional<bool> pin) {
  require_plain(layout, pin);
  c10::DeviceGuard guard(device.value_or(c10::Device(kDevice)));
  return at::detail::empty_strided_generic(size, stride, memory_of_device(), kKeys, c10::dtype_or_default(dtype));
}
static at::Tensor as_strided(
    const at::Tensor& self, c10::IntArrayRef size, c10::IntArrayRef stride, std::optional<int64_t> offset) {
  return at::native::as_strided_tensorimpl(self, size, stride, offset);
}
static const at::Tensor& resize(
    const at::Tensor& self, c10::IntArrayRef size, std::optional<c10::MemoryFormat>) {
  const size_t bytes = (c10::multiply_integers(size) + self.storage_offset()) * self.element_size();
  if (bytes > self.storage().nbytes())
    at::detail::getPrivateUse1Hooks().resizePrivateUse1Bytes(self.storage(), bytes);
  self.unsafeGetTensorImpl()->set_sizes_contiguous(size);
  return self;
}
static at::Tensor& set_storage(
    at::Tensor& self, at::Storage source, int64_t offset, c10::IntArrayRef size, c10::IntArrayRef stride) {
  self.unsafeGetTensorImpl()->set_storage_keep_dtype(std::move(source));
  self.unsafeGetTensorImpl()->set_sizes_and_strides(size, stride, offset);
  return self;
}
static at::Tensor& set_whole_storage(at::Tensor& self, at::Storage source) {
  const int64_t n = source.nbytes() / self.element_size();
  return set_storage(self, std::move(source), 0, {n}, {1});
}
static at::Tensor& set_tensor(at::Tensor& self, const at::Tensor& source) {
  return set_storage(self, source.storage(), source.storage_offset(), source.sizes(), source.strides());
}

// Copies: the host waits for those from and to its memory, unless that is pinned and the caller lets it go on

static at::Tensor copy_from(const at::Tensor& from, const at::Tensor& to, bool non_blocking) {
  if (!to.numel())
    return to;
  TORCH_CHECK(!is_ours(from) || !is_ours(to) || from.device() == to.device(), "copies between devices are not made here");
  const auto stream = current_stream((is_ours(from) ? from : to).device().index());
  enqueue(stream, "copy", [to = view_of(to), from = view_of(from)] { on_cpu(to).copy_(on_cpu(from)); });
  if (is_ours(from) && is_ours(to))
    return to;
  const void* host = (is_ours(from) ? to : from).storage().data();
  const auto done = mark(stream);
  if (is_pinned(host))
    use_pinned(host, done);
  if (!non_blocking || !is_pinned(host))
    host_wait(done, is_ours(from) ? "copy to the host" : "copy from the host");
  return to;
}
static at::Tensor copy_from_and_resize(const at::Tensor& from, const at::Tensor& to) {
  to.resize_(from.sizes());
  return copy_from(from, to, false);
}
static at::Scalar item(const at::Tensor& self) {
  host_wait(mark(current_stream(self.device().index())), "item");
  at::AutoDispatchBelowADInplaceOrView below;
  return on_cpu(view_of(self)).item();
}
static void record_stream(at::Tensor& self, c10::Stream stream) { record_use(self.storage().data(), stream); }

// All other operations

using Stack = torch::jit::Stack;
using c10::IValue;

// `value`, with `change` applied to the tensors in it, and devices replaced by `device`.
template <typename Change>
static IValue changed(const IValue& value, c10::DeviceType device, const Change& change) {
  if (value.isTensor())
    return change(value.toTensor());
  if (value.isTensorList()) {
    std::vector<at::Tensor> made;
    for (const at::Tensor& t : value.toTensorVector())
      made.push_back(change(t));
    return made;
  }
  if (value.isOptionalTensorList()) {
    c10::List<std::optional<at::Tensor>> made;
    for (const auto& t : value.toOptionalTensorVector())
      made.push_back(t && t->defined() ? std::optional<at::Tensor>(change(*t)) : std::nullopt);
    return made;
  }
  return value.isDevice() ? IValue(c10::Device(device)) : value;
}
static at::Tensor as_meta(const at::Tensor& t) {
  if (!t.defined() || (!is_ours(t) && !t.dim()))
    return t;
  auto made = at::empty_strided(t.sizes(), t.strides(), t.options().device(c10::kMeta).pinned_memory(false));
  if (t.unsafeGetTensorImpl()->is_wrapped_number())
    made.unsafeGetTensorImpl()->set_wrapped_number(true);
  return made;
}
// What a kernel is given: views, which keep no memory, and copies of the host's numbers.
static Stack as_cpu(const Stack& given) {
  Stack made;
  for (const auto& value : given)
    made.push_back(changed(value, c10::kCPU, [](const at::Tensor& t) {
      if (is_ours(t) || !t.defined())
        return is_ours(t) ? on_cpu(view_of(t)) : t;
      auto copy = t.detach().clone();
      if (t.unsafeGetTensorImpl()->is_wrapped_number())
        copy.unsafeGetTensorImpl()->set_wrapped_number(true);
      return copy;
    }));
  return made;
}
static bool writes(const c10::Argument& a) { return a.alias_info() && a.alias_info()->isWrite(); }
static bool is_generator(const c10::Argument& a) { return a.type()->str().find("Generator") != std::string::npos; }

static std::mutex shapes_lock;

struct Call {
  explicit Call(const c10::OperatorHandle& op, Stack* stack) : op(op), schema(op.schema()) {
    given.assign(stack->end() - schema.arguments().size(), stack->end());
    torch::jit::drop(*stack, schema.arguments().size());
    std::optional<c10::Device> found;
    for (const auto& value : given) {
      changed(value, kDevice, [&](const at::Tensor& t) {
        if (is_ours(t)) {
          TORCH_CHECK(!found || *found == t.device(), schema.name(), ": tensors on ", *found, " and on ", t.device());
          found = t.device();
        } else {
          const bool takes_host = schema.name().find("index") != std::string::npos;
          TORCH_CHECK(!t.defined() || !t.dim() || takes_host, schema.name(), ": found a tensor on ", t.device());
        }
        return t;
      });
    }
    for (const auto& value : given)
      if (!found && value.isDevice() && value.toDevice().type() == kDevice)
        found = value.toDevice();
    device = c10::Device(kDevice, current_stream(found ? found->index() : -1).device_index());
    for (const auto& each : schema.arguments()) {
      is_random |= is_generator(each);
      if (writes(each))
        written.push_back(given[&each - &schema.arguments()[0]]);
    }
    for (auto tag : op.getTags())
      is_random |= tag == at::Tag::nondeterministic_seeded;
    for (const auto& each : schema.returns()) {
      makes_new |= !writes(each);
      const auto& type = each.type();
      is_of_tensors &= type->isSubtypeOf(*c10::TensorType::get()) || type->isSubtypeOf(*c10::ListType::ofTensors());
    }
  }
  // All that shapes of results follow from.
  std::string described() const {
    std::ostringstream made;
    made << std::setprecision(17) << schema.name() << schema.overload_name() << c10::get_default_dtype();
    for (const auto& value : given) {
      bool has_tensors = false;
      changed(value, kDevice, [&](const at::Tensor& t) {
        has_tensors = true;
        if (t.defined())
          made << " " << t.device().type() << t.scalar_type() << t.sizes() << t.strides() << t.is_conj() << t.is_neg()
               << t.unsafeGetTensorImpl()->is_wrapped_number();
        return t;
      });
      made << "|";
      if (value.isOptionalTensorList())
        for (const auto& t : value.toOptionalTensorVector())
          made << t.has_value();
      else if (!has_tensors)
        made << value;
    }
    return made.str();
  }
  // Results by their shapes; none if only values say what those are.
  std::optional<Stack> shapes() const {
    static auto* unknown = new std::set<std::string>;
    static auto* known = new std::map<std::string, Stack>; // torch finds most in Python, which takes a millisecond
    const auto name = schema.name() + "." + schema.overload_name();
    if (is_random || !is_of_tensors || unknown->count(name))
      return std::nullopt;
    const auto like = described();
    {
      std::lock_guard<std::mutex> guard(shapes_lock);
      if (const auto found = known->find(like); found != known->end())
        return found->second;
    }
    Stack meta;
    for (const auto& value : given)
      meta.push_back(changed(value, c10::kMeta, as_meta));
    try {
      at::AutoDispatchBelowADInplaceOrView below;
      op.callBoxed(&meta);
      std::lock_guard<std::mutex> guard(shapes_lock);
      return known->emplace(like, meta).first->second;
    } catch (const std::exception& error) {
      const std::string text = error.what();
      for (const char* missing : {"NotImplemented", "not implemented", "Could not run", "DataDependent", "out of meta"})
        if (text.find(missing) != std::string::npos) {
          unknown->insert(name);
          return std::nullopt;
        }
      throw;
    }
  }
  // The results for the stack: new ones, and arguments that are written to.
  void push(Stack* stack, const Stack& made) const {
    size_t next = 0;
    for (size_t i = 0; i < schema.returns().size(); i++)
      stack->push_back(writes(schema.returns()[i]) ? written.at(next++) : made[i]);
  }
  void run_in_order(Stack* stack, const Stack& meta) const {
    std::vector<View> into;
    Stack made;
    for (size_t i = 0; i < schema.returns().size(); i++) {
      const bool is_new = !writes(schema.returns()[i]);
      made.push_back(changed(is_new ? meta[i] : IValue(), kDevice, [&](const at::Tensor& m) {
        if (!m.defined())
          return m;
        auto t = at::empty_strided(m.sizes(), m.strides(), m.options().device(device));
        into.push_back(view_of(t));
        return t;
      }));
    }
    enqueue(current_stream(device.index()), schema.name(), [op = op, cpu = as_cpu(given), into]() mutable {
      op.callBoxed(&cpu);
      size_t next = 0;
      for (const auto& value : cpu)
        changed(value, c10::kCPU, [&](const at::Tensor& t) {
          if (t.defined() && next < into.size()) {
            const auto& to = into[next++];
            TORCH_CHECK(t.sizes() == c10::IntArrayRef(to.sizes) && t.scalar_type() == to.dtype, "not as on meta");
            on_cpu(to).copy_(t);
          }
          return t;
        });
    });
    push(stack, made);
  }
  void run_at_once(Stack* stack) const {
    const auto stream = current_stream(device.index());
    if (is_random)
      run_until(mark(stream)); // a kernel of a real device would draw in order; not captured
    else
      host_wait(mark(stream), is_of_tensors ? "shape of a result" : "value of a result");
    Stack cpu = as_cpu(given);
    at::Generator source, draws;
    for (size_t i = 0; i < given.size(); i++)
      if (is_generator(schema.arguments()[i])) {
        source = given[i].isGenerator() ? given[i].toGenerator() : default_generator(device.index());
        draws = at::detail::createCPUGenerator();
        draws.set_state(source.get_state());
        cpu[i] = draws;
      }
    at::AutoDispatchBelowADInplaceOrView below;
    op.callBoxed(&cpu);
    if (source.defined())
      source.set_state(draws.get_state());
    for (auto& value : cpu)
      if (makes_new)
        value = changed(value, kDevice, [&](const at::Tensor& t) {
          if (!t.defined())
            return t;
          auto made = at::empty_strided(t.sizes(), t.strides(), t.options().device(device));
          enqueue(stream, "result", [to = view_of(made), t] { on_cpu(to).copy_(t); });
          return made;
        });
    push(stack, cpu);
  }

  c10::OperatorHandle op;
  const c10::FunctionSchema& schema;
  Stack given;
  c10::Device device{kDevice};
  bool is_random = false, is_of_tensors = true, makes_new = false;
  std::vector<IValue> written;
};

static void fallback(const c10::OperatorHandle& op, Stack* stack) {
  Call call(op, stack);
  c10::DeviceGuard guard(call.device);
  bool has_out = false;
  for (const auto& each : call.schema.arguments())
    has_out |= each.is_out();
  if (!call.makes_new && !has_out && !call.is_random && call.is_of_tensors)
    return call.run_in_order(stack, {});
  const auto meta = call.shapes();
  if (!meta)
    return call.run_at_once(stack);
  if (has_out)
    for (size_t i = 0; i < call.written.size(); i++)
      if (call.written[i].isTensor() && call.written[i].toTensor().sizes() != (*meta)[i].toTensor().sizes())
        call.written[i].toTensor().resize_((*meta)[i].toTensor().sizes());
  call.run_in_order(stack, *meta);
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>()); }

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", TORCH_FN(empty));
  m.impl("empty_strided", TORCH_FN(empty_strided));
  m.impl("as_strided", TORCH_FN(as_strided));
  m.impl("_reshape_alias", TORCH_FN(at::native::_reshape_alias));
  m.impl("view", TORCH_FN(at::native::view));
  m.impl("unfold", TORCH_FN(at::native::unfold));
  m.impl("resize_", TORCH_FN(resize));
  m.impl("set_.source_Storage", TORCH_FN(set_whole_storage));
  m.impl("set_.source_Storage_storage_offset", TORCH_FN(set_storage));
  m.impl("set_.source_Tensor", TORCH_FN(set_tensor));
  m.impl("_copy_from", TORCH_FN(copy_from));
  m.impl("_copy_from_and_resize", TORCH_FN(copy_from_and_resize));
  m.impl("_local_scalar_dense", TORCH_FN(item));
  m.impl("record_stream", TORCH_FN(record_stream));
  m.impl("native_layer_norm", torch::CppFunction::makeFromBoxedFunction<&fallback>()); // or torch decomposes it
}
// Or torch would clone a conjugated source for a copy, and copy that to clone it.
TORCH_LIBRARY_IMPL(aten, Conjugate, m) { m.impl("_copy_from", torch::CppFunction::makeFallthrough()); }
TORCH_LIBRARY_IMPL(aten, Negative, m) { m.impl("_copy_from", torch::CppFunction::makeFallthrough()); }

TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, m) { m.fallback(torch::CppFunction::makeFallthrough()); }
TORCH_LIBRARY_IMPL(aten, AutocastPrivateUse1, m) {
  KERNEL_PRIVATEUSEONE(linear, lower_precision_fp)
  KERNEL_PRIVATEUSEONE(matmul, lower_precision_fp)
  KERNEL_PRIVATEUSEONE(mm, lower_precision_fp)
  KERNEL_PRIVATEUSEONE(addmm, lower_precision_fp)
}

} // namespace ours
