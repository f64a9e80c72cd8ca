#include "gradwire/bind/module.h"

PYBIND11_MODULE(_core, m, pybind11::mod_gil_not_used()) {
  using namespace gradwire::bind;
  m.doc() = "The C++ core of gradwire. Private: use the classes of `gradwire`.";
  bind_errors(m);
  bind_arrays(m);
  bind_codec(m);
  bind_feedback(m);
  bind_exchange(m);
  bind_schedule(m);
  bind_cost(m);
  bind_crypto(m);
  bind_transport(m);
  bind_cuda(m);
  bind_trace(m);
  bind_communicator(m);
  bind_gpu(m);
  bind_call_cache(m);
  bind_status(m);
  bind_serve(m);
}
