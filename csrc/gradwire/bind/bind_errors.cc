// Makes one Python class for each C++ error.
#include <exception>
#include <string>
#include <string_view>
#include <system_error>

#include "gradwire/base/error.h"
#include "gradwire/bind/module.h"

namespace gradwire::bind {
namespace {

// The classes, by which errors are raised. They are never released, since errors may be thrown as
// long as the interpreter lives.
PyObject *error_class, *invalid_argument, *schedule_error, *rendezvous_error, *transport_error,
    *timeout_class, *aborted;

PyObject* add(py::module_& m, const char* name, const char* doc, const py::tuple& bases,
              const py::dict& members = {}) {
  const std::string full = std::string("gradwire.") + name;
  PyObject* made = PyErr_NewExceptionWithDoc(full.c_str(), doc, bases.ptr(), members.ptr());
  if (made == nullptr) throw py::error_already_set();
  m.add_object(name, py::handle(made));
  return made;
}

// Returns the error's text. One that came from another rank may end in the middle of a character.
py::object text_of(const std::exception& error) {
  const std::string_view text = error.what();
  return py::reinterpret_steal<py::object>(
      PyUnicode_DecodeUTF8(text.data(), static_cast<Py_ssize_t>(text.size()), "replace"));
}

void raise(PyObject* type, const std::exception& error) {
  PyErr_SetObject(type, text_of(error).ptr());
}

void raise_with_peer(PyObject* type, const PeerError& error) {
  py::object made = py::handle(type)(text_of(error));
  made.attr("peer") = error.peer();
  made.attr("job_peer") = error.job_peer();
  PyErr_SetObject(type, made.ptr());
}

void translate(std::exception_ptr error) {
  try {
    if (error) std::rethrow_exception(error);
  } catch (const InvalidArgument& e) {
    raise(invalid_argument, e);
  } catch (const ScheduleError& e) {
    raise(schedule_error, e);
  } catch (const RendezvousError& e) {
    raise(rendezvous_error, e);
  } catch (const Aborted& e) {
    raise_with_peer(aborted, e);
  } catch (const Timeout& e) {
    raise_with_peer(timeout_class, e);
  } catch (const TransportError& e) {
    raise_with_peer(transport_error, e);
  } catch (const Error& e) {
    raise(error_class, e);
  } catch (const std::system_error& e) {
    raise(error_class,
          Error(std::string("the system refuses a thread, or what else it takes: ") + e.what()));
  }
}

}  // namespace

void bind_errors(py::module_& m) {
  const py::handle runtime_error(PyExc_RuntimeError), value_error(PyExc_ValueError);
  const py::handle timeout_error(PyExc_TimeoutError);
  py::dict peer;
  peer["peer"] = kNoPeer;
  peer["job_peer"] = kNoPeer;
  error_class =
      add(m, "Error", "Base of everything that gradwire raises.", py::make_tuple(runtime_error));
  const py::handle error(error_class);
  invalid_argument = add(m, "InvalidArgument",
                         "The call itself is wrong; where nothing was sent yet, the "
                         "communicator lives on.",
                         py::make_tuple(error, value_error));
  schedule_error =
      add(m, "ScheduleError", "A schedule is malformed, or does not fit the codec or the call.",
          py::make_tuple(error, value_error));
  rendezvous_error =
      add(m, "RendezvousError", "The ranks could not find or authenticate each other.",
          py::make_tuple(error));
  aborted = add(m, "Aborted",
                "abort() or close() ended the call, or Ctrl-C or an exception did; `peer` "
                "is the rank where, -1 where it is not known, and `job_peer` its "
                "number in the job.",
                py::make_tuple(error), peer.attr("copy")());
  transport_error = add(m, "TransportError",
                        "A peer vanished or sent something impossible; `peer` is its rank, "
                        "-1 where it is not known or no member, and `job_peer` its number "
                        "in the job.",
                        py::make_tuple(error), peer.attr("copy")());
  timeout_class = add(m, "Timeout",
                      "A deadline passed; `peer` is the rank that was waited for, -1 where it is "
                      "not known or no member, and `job_peer` its number in the job.",
                      // In this order both OSError's __new__ and its errno work.
                      py::make_tuple(timeout_error, error), peer);
  py::register_exception_translator(&translate);
}

}  // namespace gradwire::bind
