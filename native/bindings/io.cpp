// Python's way to native/io: argument conversion, the GIL, Ctrl-C, errors. No logic of its own.
// The door (stoker/native/io.py) adds the typed errors and the documentation.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <chrono>
#include <cstring>

#include "io/arena.h"
#include "io/file.h"
#include "io/read_queue.h"

namespace nb = nanobind;
using namespace nb::literals;
using namespace stoker::io;

namespace {

constexpr std::int64_t kSliceNs = 100'000'000;  // how long Ctrl-C may go unnoticed in a wait

std::int64_t clock_ns() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

const char* name_of(State state) {
  switch (state) {
    case State::pending: return "pending";
    case State::in_flight: return "in_flight";
    case State::done: return "done";
    case State::expired: return "expired";
    case State::failed: return "failed";
    case State::cancelled: return "cancelled";
  }
  return "";
}

template <class Value, std::size_t N>
Value named(const std::pair<const char*, Value> (&names)[N], const std::string& name, const char* what) {
  std::string valid;
  for (const auto& [known, value] : names) {
    if (name == known) return value;
    valid += valid.empty() ? known : std::string(", ") + known;
  }
  throw std::invalid_argument(std::string(what) + " must be one of " + valid + "; got '" + name + "'");
}

Backend backend_named(const std::string& name) {
  static constexpr std::pair<const char*, Backend> names[] = {
      {"auto", Backend::automatic}, {"io_uring", Backend::io_uring}, {"threads", Backend::threads}};
  return named(names, name, "backend");
}

Fault fault_named(const std::string& name) {
  static constexpr std::pair<const char*, Fault> names[] = {
      {"eio", Fault::eio},     {"short", Fault::short_read}, {"eof", Fault::end_of_file},
      {"eintr", Fault::eintr}, {"eagain", Fault::eagain},    {"delay", Fault::delay}};
  return named(names, name, "fault kind");
}

void check_signals() {
  if (PyErr_CheckSignals() != 0) throw nb::python_error();
}

// Sleeps without the GIL in slices; between them signal handlers run and may raise, which leaves every ticket as it was.
std::size_t wait_any(ReadQueue& queue, const std::vector<Ticket>& tickets) {
  for (;;) {
    std::optional<std::size_t> index;
    {
      nb::gil_scoped_release released;
      index = queue.wait_any(tickets, kSliceNs);
    }
    if (index) return *index;
    check_signals();
  }
}

nb::tuple wait(ReadQueue& queue, Ticket ticket) {
  if (queue.wait_any({&ticket, 1}, 0)) {
    queue.free(ticket);
    return nb::make_tuple(name_of(queue.state(ticket)), 0);
  }
  const std::int64_t before = clock_ns();
  wait_any(queue, {ticket});
  const char* state = name_of(queue.state(ticket));
  queue.free(ticket);
  return nb::make_tuple(state, clock_ns() - before);
}

bool poll(ReadQueue& queue, Ticket ticket) { return queue.wait_any({&ticket, 1}, 0).has_value(); }

nb::dict report(const ReadQueue& queue, Ticket ticket) {
  const Report r = queue.report(ticket);
  nb::dict out;
  out["state"] = name_of(r.state);
  out["submit_ns"] = r.submit_ns, out["start_ns"] = r.start_ns, out["end_ns"] = r.end_ns;
  out["path"] = r.path, out["offset"] = r.offset, out["length"] = r.length, out["tag"] = r.tag;
  out["bytes"] = r.state == State::done ? r.length : r.got;
  out["errno"] = r.error > 0 ? r.error : 0;
  out["ended_early"] = r.error == kEndOfFile;
  return out;
}

nb::dict stats(const ReadQueue& queue) {
  const Stats s = queue.stats();
  nb::dict out;
  out["demand_reads"] = s.demand_reads, out["demand_bytes"] = s.demand_bytes;
  out["prefetch_reads"] = s.prefetch_reads, out["prefetch_bytes"] = s.prefetch_bytes;
  out["expired"] = s.expired, out["cancelled"] = s.cancelled, out["failed"] = s.failed, out["promoted"] = s.promoted;
  out["short_results"] = s.short_results, out["retries"] = s.retries;
  out["in_flight"] = s.in_flight, out["in_flight_max"] = s.in_flight_max;
  out["pending"] = s.pending, out["outstanding"] = s.outstanding;
  out["queued_ns"] = s.queued_ns, out["service_ns"] = s.service_ns, out["busy_ns"] = s.busy_ns;
  return out;
}

// The tensor owns a share of the mapping, not of the Python object: it stays valid after close().
nb::ndarray<nb::pytorch, std::uint8_t> arena_tensor(const std::shared_ptr<Arena>& arena, std::size_t offset,
                                                    std::size_t nbytes) {
  if (offset > arena->nbytes() || nbytes > arena->nbytes() - offset)
    throw std::invalid_argument("bytes " + std::to_string(offset) + " to " + std::to_string(offset + nbytes) +
                                " are not in an arena of " + std::to_string(arena->nbytes()));
  nb::capsule owner(new std::shared_ptr<Arena>(arena),
                    [](void* share) noexcept { delete static_cast<std::shared_ptr<Arena>*>(share); });
  return nb::ndarray<nb::pytorch, std::uint8_t>(arena->data() + offset, {nbytes}, owner);
}

struct ArenaHandle {
  std::shared_ptr<Arena> arena;

  const std::shared_ptr<Arena>& open() const {
    if (arena == nullptr) throw std::invalid_argument("the arena is closed");
    return arena;
  }
};

bool read_into(const std::string& path, std::uint64_t offset, std::size_t length, std::uintptr_t address) {
  nb::gil_scoped_release released;
  return read_file_into(path, offset, length, reinterpret_cast<std::uint8_t*>(address), [] {
    nb::gil_scoped_acquire held;
    check_signals();
  });
}

void raise_os_error(int error, const std::string& detail) {
  PyObject* args = Py_BuildValue("(iss)", error, std::strerror(error), detail.c_str());
  if (args == nullptr) return;
  PyErr_SetObject(PyExc_OSError, args);
  Py_DECREF(args);
}

void translate(const std::exception_ptr& raised, void*) {
  try {
    std::rethrow_exception(raised);
  } catch (const FileError& error) {
    raise_os_error(error.code().value(), error.path);
  } catch (const std::system_error& error) {
    raise_os_error(error.code().value(), error.what());
  } catch (const ShortRead& error) {
    PyErr_SetString(PyExc_EOFError, std::to_string(error.got_bytes).c_str());
  }
}

}  // namespace

NB_MODULE(_io, m) {
  nb::register_exception_translator(translate);
  nb::set_leak_warnings(false);  // a daemon thread may hold a queue when the interpreter ends: no fault of anyone's
  m.attr("BLOCK_BYTES") = kBlockBytes;

  nb::class_<ArenaHandle>(m, "Arena")
      .def("__init__", [](ArenaHandle* self, std::size_t nbytes, bool huge_pages) {
        new (self) ArenaHandle{Arena::create(nbytes, huge_pages)};
      }, "nbytes"_a, "huge_pages"_a)
      .def_prop_ro("address", [](const ArenaHandle& a) { return reinterpret_cast<std::uintptr_t>(a.open()->data()); })
      .def_prop_ro("nbytes", [](const ArenaHandle& a) { return a.open()->nbytes(); })
      .def("tensor", [](const ArenaHandle& a, std::size_t offset, std::size_t nbytes) {
        return arena_tensor(a.open(), offset, nbytes);
      }, "offset"_a, "nbytes"_a)
      .def("populate", [](const ArenaHandle& a, std::size_t offset, std::size_t nbytes) {
        a.open()->populate(offset, nbytes);
      }, "offset"_a, "nbytes"_a, nb::call_guard<nb::gil_scoped_release>())
      .def("pages", [](const ArenaHandle& a) {
        const Arena::Pages pages = a.open()->pages();
        return nb::make_tuple(pages.resident_bytes, pages.huge_bytes);
      })
      .def("close", [](ArenaHandle& a) { a.arena.reset(); }, nb::call_guard<nb::gil_scoped_release>());

  nb::class_<ReadQueue>(m, "ReadQueue")
      .def("__init__", [](ReadQueue* self, int depth, const std::string& backend, bool direct) {
        new (self) ReadQueue(depth, backend_named(backend), direct);
      }, "depth"_a, "backend"_a, "direct"_a)
      .def_prop_ro("depth", &ReadQueue::depth)
      .def("allow", &ReadQueue::allow, "depth"_a)
      .def_prop_ro("backend", [](const ReadQueue& q) { return q.backend() == Backend::io_uring ? "io_uring" : "threads"; })
      .def_prop_ro("backend_note", &ReadQueue::backend_note)
      .def_prop_ro("direct", &ReadQueue::direct)
      .def("open", &ReadQueue::open, "path"_a, "direct"_a = nb::none())
      .def("is_direct", &ReadQueue::is_direct, "file"_a)
      .def("submit", [](ReadQueue& q, int file, std::uint64_t offset, std::size_t length, std::uintptr_t address,
                        bool prefetch, std::int64_t deadline_ns, std::int64_t tag) {
        return q.submit({file, offset, length, reinterpret_cast<std::uint8_t*>(address)}, prefetch, deadline_ns, tag);
      }, "file"_a, "offset"_a, "length"_a, "address"_a, "prefetch"_a, "deadline_ns"_a, "tag"_a)
      .def("wait", &wait, "ticket"_a)
      .def("wait_any", &wait_any, "tickets"_a)
      .def("poll", &poll, "ticket"_a)
      .def("state", [](const ReadQueue& q, Ticket ticket) { return name_of(q.state(ticket)); }, "ticket"_a)
      .def("promote", &ReadQueue::promote, "ticket"_a)
      .def("cancel", &ReadQueue::cancel, "ticket"_a)
      .def("report", &report, "ticket"_a)
      .def("stats", &stats)
      .def("inject", [](ReadQueue& q, std::int64_t nth, const std::string& kind, std::int64_t delay_ns) {
        q.inject(nth, fault_named(kind), delay_ns);
      }, "nth"_a, "kind"_a, "delay_ns"_a)
      .def("close", &ReadQueue::close, nb::call_guard<nb::gil_scoped_release>());

  m.def("read_file_into", &read_into, "path"_a, "offset"_a, "length"_a, "address"_a);
  m.def("drop_cache", &drop_cache, "path"_a, nb::call_guard<nb::gil_scoped_release>());
  m.def("cached_bytes", &cached_bytes, "path"_a);
}
