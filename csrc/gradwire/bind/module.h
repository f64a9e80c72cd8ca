// The parts of the extension module gradwire._core. python/gradwire/_core.pyi lists what is in
// them.
#pragma once

#include <pybind11/pybind11.h>

#include <optional>
#include <utility>

namespace gradwire::bind {

namespace py = pybind11;

// A method of what a handle refers to, as a method of the handle.
template <typename Handle, auto kMethod, typename... Args>
constexpr auto on =
    [](Handle& self, Args... args) { return (self.get().*kMethod)(std::forward<Args>(args)...); };

// Gives up the GIL for as long as it lives.
class Unlocked {
 public:
  Unlocked();
  ~Unlocked();
  Unlocked(const Unlocked&) = delete;
  Unlocked& operator=(const Unlocked&) = delete;

 private:
  std::optional<py::gil_scoped_release> released_;
};

// Waits, at most `seconds`, until no thread is Unlocked. If a daemon thread wants the GIL back
// while the interpreter shuts down, its stack is unwound, to which C++ answers with terminate().
void await_calls(double seconds);
// Sets the count to zero in a forked child, where the threads that were Unlocked do not exist.
// Every change of the count is made with the GIL held, and so is a fork.
void forget_calls();

void bind_errors(py::module_& m);
void bind_arrays(py::module_& m);
void bind_codec(py::module_& m);
void bind_feedback(py::module_& m);
void bind_exchange(py::module_& m);
void bind_schedule(py::module_& m);
void bind_cost(py::module_& m);
void bind_crypto(py::module_& m);
void bind_transport(py::module_& m);
void bind_cuda(py::module_& m);
void bind_trace(py::module_& m);
void bind_communicator(py::module_& m);
void bind_gpu(py::module_& m);
void bind_call_cache(py::module_& m);
void bind_status(py::module_& m);
void bind_serve(py::module_& m);

}  // namespace gradwire::bind
