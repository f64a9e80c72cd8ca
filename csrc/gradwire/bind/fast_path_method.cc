#include "gradwire/bind/fast_path_method.h"

#include <structmember.h>

#include <array>
#include <cstddef>
#include <exception>

namespace gradwire::bind {
namespace {

constexpr const char* kCapsule = "gradwire.CallCache";
constexpr std::size_t kMostOptions = 16;

struct FastPathMethod {
  PyObject head;
  vectorcallfunc vectorcall;
  PyObject* function;
  PyObject* names;     // of the function's keyword-only parameters
  PyObject* defaults;  // of these parameters, in the same order
  Py_ssize_t positional;
  PyObject* dict;
};

FastPathMethod* as_method(PyObject* object) { return reinterpret_cast<FastPathMethod*>(object); }

// Sets the Python error that a call would raise.
void set_error(const std::exception_ptr& error) noexcept {
  try {
    py::cpp_function([error] { std::rethrow_exception(error); })();
  } catch (py::error_already_set& raised) {
    raised.restore();
  }
}

// Places the values of `kwnames` among the options. An `out` that is the array itself is none.
// Returns false if one has another name. Names of keywords are interned.
bool place(const FastPathMethod& method, PyObject* array, PyObject* kwnames,
           PyObject* const* values, PyObject** options) noexcept {
  static PyObject* const out = PyUnicode_InternFromString("out");
  const Py_ssize_t count = PyTuple_GET_SIZE(method.names);
  for (Py_ssize_t i = 0; i < count; ++i) options[i] = PyTuple_GET_ITEM(method.defaults, i);
  for (Py_ssize_t k = 0; kwnames != nullptr && k < PyTuple_GET_SIZE(kwnames); ++k) {
    Py_ssize_t at = 0;
    while (at < count && PyTuple_GET_ITEM(method.names, at) != PyTuple_GET_ITEM(kwnames, k)) ++at;
    if (at == count) return false;
    const bool in_place = values[k] == array && PyTuple_GET_ITEM(kwnames, k) == out;
    options[at] = in_place ? Py_None : values[k];
  }
  return true;
}

std::shared_ptr<CallCache> cache_of(PyObject* instance) noexcept {
  static PyObject* const name = PyUnicode_InternFromString("_call_cache");
  PyObject* capsule = PyObject_GetAttr(instance, name);
  void* kept = capsule == nullptr ? nullptr : PyCapsule_GetPointer(capsule, kCapsule);
  std::shared_ptr<CallCache> found;
  if (kept != nullptr) found = *static_cast<std::shared_ptr<CallCache>*>(kept);
  Py_XDECREF(capsule);
  if (found == nullptr) PyErr_Clear();
  return found;
}

// Calls the method. The arguments are the instance and then the array, if there is one.
PyObject* call(PyObject* self, PyObject* const* args, std::size_t nargsf, PyObject* kwnames) {
  const FastPathMethod& method = *as_method(self);
  const Py_ssize_t count = PyVectorcall_NARGS(nargsf);
  std::array<PyObject*, kMostOptions> options;
  PyObject* array = count > 1 ? args[1] : nullptr;
  if (count == method.positional && place(method, array, kwnames, args + count, options.data())) {
    try {
      const std::shared_ptr<CallCache> cache = cache_of(args[0]);
      if (cache != nullptr && cache->call(self, array, options.data()))
        return Py_NewRef(array != nullptr ? array : Py_None);
    } catch (...) {
      set_error(std::current_exception());
      return nullptr;
    }
  }
  return PyObject_Vectorcall(method.function, args, nargsf, kwnames);
}

PyObject* get(PyObject* self, PyObject* instance, PyObject*) {
  return instance == nullptr ? Py_NewRef(self) : PyMethod_New(self, instance);
}

int traverse(PyObject* self, visitproc visit, void* arg) {
  Py_VISIT(Py_TYPE(self));
  Py_VISIT(as_method(self)->function);
  Py_VISIT(as_method(self)->defaults);
  Py_VISIT(as_method(self)->dict);
  return 0;
}

int clear(PyObject* self) {
  Py_CLEAR(as_method(self)->function);
  Py_CLEAR(as_method(self)->names);
  Py_CLEAR(as_method(self)->defaults);
  Py_CLEAR(as_method(self)->dict);
  return 0;
}

void deallocate(PyObject* self) {
  PyTypeObject* type = Py_TYPE(self);
  PyObject_GC_UnTrack(self);
  clear(self);
  type->tp_free(self);
  Py_DECREF(type);
}

// Reads the names and defaults of the decorated function's keywords.
void describe(FastPathMethod& method, const py::function& function) {
  const py::object code = function.attr("__code__");
  const auto positional = code.attr("co_argcount").cast<Py_ssize_t>();
  const py::tuple variables = code.attr("co_varnames");
  const py::dict given = function.attr("__kwdefaults__");
  const auto count = static_cast<Py_ssize_t>(given.size());
  if (given.size() > kMostOptions || positional < 1 || positional > 2 ||
      code.attr("co_kwonlyargcount").cast<Py_ssize_t>() != count)
    throw py::type_error("a method with a fast path takes an array, or nothing, and keywords");
  py::tuple names(count), defaults(count);
  for (Py_ssize_t i = 0; i < count; ++i) {
    names[i] = variables[positional + i];
    defaults[i] = given[names[i]];
  }
  method.function = function.inc_ref().ptr();
  method.names = names.release().ptr();
  method.defaults = defaults.release().ptr();
  method.positional = positional;
  method.vectorcall = &call;
}

PyObject* make(PyTypeObject* type, PyObject* args, PyObject*) {
  PyObject* function = nullptr;
  if (PyArg_ParseTuple(args, "O!", &PyFunction_Type, &function) == 0) return nullptr;
  auto made = py::reinterpret_steal<py::object>(type->tp_alloc(type, 0));
  if (!made) return nullptr;
  try {
    const auto decorated = py::reinterpret_borrow<py::function>(function);
    describe(*as_method(made.ptr()), decorated);
    py::module_::import("functools").attr("update_wrapper")(made, decorated);
  } catch (...) {
    set_error(std::current_exception());
    return nullptr;
  }
  return made.release().ptr();
}

PyMemberDef members[] = {
    {"__vectorcalloffset__", T_PYSSIZET, offsetof(FastPathMethod, vectorcall), READONLY, nullptr},
    {"__dictoffset__", T_PYSSIZET, offsetof(FastPathMethod, dict), READONLY, nullptr},
    {"names", T_OBJECT, offsetof(FastPathMethod, names), READONLY, nullptr},
    {},
};

PyGetSetDef properties[] = {
    {"__dict__", PyObject_GenericGetDict, PyObject_GenericSetDict, nullptr, nullptr},
    {},
};

template <typename Function>
PyType_Slot slot(int which, Function* function) {
  return {which, reinterpret_cast<void*>(function)};
}

py::object make_type() {
  PyType_Slot slots[] = {
      slot(Py_tp_new, make),
      slot(Py_tp_call, PyVectorcall_Call),
      slot(Py_tp_descr_get, get),
      slot(Py_tp_traverse, traverse),
      slot(Py_tp_clear, clear),
      slot(Py_tp_dealloc, deallocate),
      {Py_tp_members, members},
      {Py_tp_getset, properties},
      {0, nullptr},
  };
  PyType_Spec spec = {"gradwire._core.fast_path_method", sizeof(FastPathMethod), 0,
                      Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_HAVE_VECTORCALL |
                          Py_TPFLAGS_METHOD_DESCRIPTOR,
                      slots};
  PyObject* type = PyType_FromSpec(&spec);
  if (type == nullptr) throw py::error_already_set();
  return py::reinterpret_steal<py::object>(type);
}

}  // namespace

py::capsule as_capsule(const std::shared_ptr<CallCache>& cache) {
  auto* kept = new std::shared_ptr<CallCache>(cache);
  return py::capsule(kept, kCapsule, [](PyObject* capsule) {
    delete static_cast<std::shared_ptr<CallCache>*>(PyCapsule_GetPointer(capsule, kCapsule));
  });
}

void bind_fast_path_method(py::module_& m) { m.attr("fast_path_method") = make_type(); }

}  // namespace gradwire::bind
