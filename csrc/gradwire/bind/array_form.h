// ArrayForm: type, shape and address of a NumPy array or of a torch tensor on the CPU, read within
// a microsecond. The libraries are not linked: NumPy's struct is read directly, and torch's methods
// are called, once learn_torch() has found them.
#pragma once

#include <pybind11/pybind11.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>

namespace gradwire::bind {

namespace py = pybind11;

class ArrayForm {
 public:
  // Returns the form of an array that is contiguous, on the CPU and writable; nullopt for any
  // other, and for objects whose type is neither library's own array.
  static std::optional<ArrayForm> of(PyObject* array);

  // Returns whether a call that was made with the other array may be made with this one.
  bool is_like(const ArrayForm& other) const noexcept;

  std::byte* data() const noexcept { return data_; }
  std::uint64_t elements() const noexcept { return elements_; }

 private:
  static constexpr std::size_t kMostDimensions = 8;

  static std::optional<ArrayForm> of_numpy(PyObject* array);
  static std::optional<ArrayForm> of_tensor(PyObject* tensor);
  bool take_shape(std::span<const Py_ssize_t> shape) noexcept;

  PyTypeObject* type_ = nullptr;  // the libraries' own, which live as long as the process
  py::object dtype_;
  std::size_t dimensions_ = 0;
  std::array<Py_ssize_t, kMostDimensions> shape_{};
  std::uint64_t elements_ = 1;
  std::byte* data_ = nullptr;
};

// Looks torch up, so that its tensors are recognised from now on.
void learn_torch();
// Tells autograd that a tensor was written to. Does nothing for any other array.
void note_write(PyObject* array);

}  // namespace gradwire::bind
