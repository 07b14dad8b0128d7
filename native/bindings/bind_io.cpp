#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <cmath>

#include "arrays.h"
#include "tutti/gio/gio_executor.h"
#include "tutti/lane_executor.h"
#include "tutti/raw_transfer.h"

namespace tutti::bindings {
namespace {

// Seconds from now; negative or infinite = no limit.
Clock::time_point after(double seconds) {
  constexpr double kForever = 1e9;
  if (seconds < 0 || std::isinf(seconds) || seconds > kForever) {
    return Clock::time_point::max();
  }
  return Clock::now() + std::chrono::nanoseconds(static_cast<int64_t>(seconds * 1e9));
}

std::shared_ptr<Plan> submit(Executor& executor, bool write, const In<uint32_t>& slots, const In<uint32_t>& generations,
                             const In<uint8_t>& rots, const In<uint32_t>& blocks, double deadline_seconds,
                             uint64_t stream) {
  const size_t n = slots.shape(0);
  if (generations.shape(0) != n || rots.shape(0) != n) {
    throw nb::value_error("slots, generations and rots must have one entry per block");
  }
  const nb::gil_scoped_release release;
  return executor.submit(write ? Direction::Write : Direction::Read, to_vector(slots), to_vector(generations),
                         to_vector(rots), to_vector(blocks), after(deadline_seconds), stream);
}

nb::dict stats(const Executor& executor) {
  const ExecutorStats& stats = executor.stats();
  nb::dict result;
  result["bytes_read"] = stats.bytes_read.load();
  result["bytes_written"] = stats.bytes_written.load();
  result["objects_read"] = stats.objects_read.load();
  result["objects_written"] = stats.objects_written.load();
  result["staged_objects"] = stats.staged_objects.load();
  result["checksum_errors"] = stats.checksum_errors.load();
  result["device_errors"] = stats.device_errors.load();
  result["timeouts"] = stats.timeouts.load();
  return result;
}

std::tuple<double, double> raw(const In<int32_t>& fds, const In<uint64_t>& offsets, const In<uint64_t>& addresses,
                               uint64_t bytes, bool write, uint32_t threads, uint32_t depth,
                               const std::vector<std::tuple<uint64_t, uint64_t>>& memory) {
  std::vector<RawRange> ranges;
  for (size_t i = 0; i < fds.shape(0); ++i) {
    ranges.push_back({fds.data()[i], offsets.data()[i], addresses.data()[i]});
  }
  std::vector<std::pair<uint64_t, uint64_t>> registered;
  for (const auto& [first, last] : memory) {
    registered.emplace_back(first, last);
  }
  const nb::gil_scoped_release release;
  const RawSeconds seconds = raw_transfer(ranges, bytes, write, threads, depth, registered);
  return {seconds.wall, seconds.processor};
}

using gio::GioExecutor;
using gio::GioOptions;

// (descriptor, memory alignment, offset alignment) of each device.
using Devices = std::vector<std::tuple<int, uint32_t, uint32_t>>;

std::vector<DeviceFile> files_of(const Devices& devices) {
  std::vector<DeviceFile> files;
  for (const auto& [fd, memory, offset] : devices) {
    files.push_back({fd, memory, offset});
  }
  return files;
}

void check_layer(const Plan& plan, uint32_t layer) {
  if (layer >= plan.objects / plan.kv_factor) {
    throw nb::index_error("layer out of range");
  }
}

}  // namespace

void bind_io(nb::module_& module) {
  nb::class_<Layout>(module, "Layout", "Where every object lies (tensor stripe).")
      .def(
          "__init__",
          [](Layout* self, uint32_t objects, uint32_t kv_factor, uint32_t world, uint32_t rank, uint64_t payload_bytes,
             uint64_t object_bytes, uint64_t slots, std::vector<uint64_t> data_offset) {
            if (objects == 0 || kv_factor == 0 || objects % kv_factor != 0 || data_offset.empty() || rank >= world) {
              throw nb::value_error("layout: objects, kv_factor, world, rank or devices out of range");
            }
            new (self)
                Layout{objects, kv_factor, world, rank, payload_bytes, object_bytes, slots, std::move(data_offset)};
          },
          nb::arg("objects"), nb::arg("kv_factor"), nb::arg("world"), nb::arg("rank"), nb::arg("payload_bytes"),
          nb::arg("object_bytes"), nb::arg("slots"), nb::arg("data_offset"))
      .def(
          "address",
          [](const Layout& layout, uint64_t slot, uint32_t rot, uint32_t object) {
            const Address address = layout.address(slot, rot, object);
            return std::make_tuple(address.device, address.offset);
          },
          nb::arg("slot"), nb::arg("rot"), nb::arg("object"), "(device, byte offset) of an object.")
      .def_prop_ro("objects_per_device", &Layout::objects_per_device);

  nb::class_<FaultInjector>(module, "FaultInjector", "Makes chosen operations fail; for tests.")
      .def(nb::init<>())
      .def(
          "add",
          [](FaultInjector& self, bool write, const std::string& kind, uint64_t every, int device, int error,
             uint64_t limit, uint64_t seed) {
            Fault fault{FaultKind::None, error, seed};
            if (kind == "error") {
              fault.kind = FaultKind::Error;
            } else if (kind == "short") {
              fault.kind = FaultKind::Short;
            } else if (kind == "hang") {
              fault.kind = FaultKind::Hang;
            } else if (kind == "corrupt") {
              fault.kind = FaultKind::Corrupt;
            } else {
              throw nb::value_error("kind must be error, short, hang or corrupt");
            }
            self.add(write ? Direction::Write : Direction::Read, device, every, fault, limit);
          },
          nb::arg("write"), nb::arg("kind"), nb::arg("every") = 1, nb::arg("device") = -1, nb::arg("error") = 5,
          nb::arg("limit") = UINT64_MAX, nb::arg("seed") = 1)
      .def("clear", &FaultInjector::clear)
      .def("release", &FaultInjector::release)
      .def_prop_ro("injected", &FaultInjector::injected);

  nb::class_<Plan>(module, "Plan", "A running or finished store or retrieve.")
      .def("done", &Plan::done)
      .def("drained", &Plan::drained)
      .def(
          "layer_done",
          [](const Plan& plan, uint32_t layer) {
            check_layer(plan, layer);
            return plan.layer_done(layer);
          },
          nb::arg("layer"))
      .def(
          "wait",
          [](Plan& plan, double seconds) {
            const nb::gil_scoped_release release;
            return plan.wait(after(seconds));
          },
          nb::arg("seconds"))
      .def(
          "wait_layer",
          [](Plan& plan, uint32_t layer, double seconds) {
            check_layer(plan, layer);
            const nb::gil_scoped_release release;
            return plan.wait_layer(layer, after(seconds));
          },
          nb::arg("layer"), nb::arg("seconds"))
      .def(
          "wait_drained",
          [](Plan& plan, double seconds) {
            const nb::gil_scoped_release release;
            return plan.wait_drained(after(seconds));
          },
          nb::arg("seconds"))
      .def("cancel", [](Plan& plan) { plan.end_early(Status::Cancelled); })
      .def("statuses", [](const Plan& plan) { return to_numpy(plan.statuses()); })
      .def(
          "sums",
          [](const Plan& plan) {
            if (!plan.drained()) {
              throw std::invalid_argument("the sums of a plan are known when it is drained");
            }
            return to_numpy(plan.sums);
          },
          "Of a drained plan: the checksum of every object, block by block. One entry per block and object.")
      .def_prop_ro("seconds", &Plan::seconds)
      .def_prop_ro("blocks", &Plan::blocks)
      .def_prop_ro("layers", [](const Plan& plan) { return plan.objects / plan.kv_factor; });

  nb::class_<Executor>(module, "Executor", "Moves bytes between devices and the engine's tensors.")
      .def(
          "start",
          [](Executor& executor, const In<uint64_t>& bases, const In<uint64_t>& strides, const In<uint64_t>& blocks,
             const In<uint32_t>& groups) {
            std::vector<TensorRegion> regions;
            for (size_t i = 0; i < bases.shape(0); ++i) {
              regions.push_back({bases.data()[i], strides.data()[i], blocks.data()[i], groups.data()[i]});
            }
            const nb::gil_scoped_release release;
            executor.start(std::move(regions));
          },
          nb::arg("bases"), nb::arg("strides"), nb::arg("blocks"), nb::arg("groups"))
      .def("submit", &submit, nb::arg("write"), nb::arg("slots"), nb::arg("generations"), nb::arg("rots"),
           nb::arg("blocks"), nb::arg("deadline_seconds"), nb::arg("stream") = Executor::kNoStream)
      .def(
          "stop",
          [](Executor& executor, double grace_seconds) {
            const nb::gil_scoped_release release;
            executor.stop(std::chrono::milliseconds(static_cast<int64_t>(grace_seconds * 1e3)));
          },
          nb::arg("grace_seconds"))
      .def_prop_ro("started", &Executor::started)
      .def_prop_ro("note", nb::overload_cast<>(&Executor::note, nb::const_))
      .def("stats", &stats);

  nb::class_<LaneExecutor, Executor>(module, "LaneExecutor", "Threads that move bytes of host tensors.")
      .def(
          "__init__",
          [](LaneExecutor* self, const Layout& layout, const Devices& devices, const std::string& kind, uint32_t lanes,
             uint32_t queue_depth, bool register_buffers, const SlotTable* table, FaultInjector* faults) {
            LaneOptions options;
            options.kind = kind == "posix" ? ExecutorKind::Posix : ExecutorKind::Uring;
            options.lanes = lanes;
            options.queue_depth = queue_depth;
            options.iocbs = std::max<uint32_t>(16, 4 * lanes);
            options.register_buffers = register_buffers && options.kind == ExecutorKind::Uring;
            new (self) LaneExecutor(layout, files_of(devices), options, table, faults);
          },
          nb::arg("layout"), nb::arg("devices"), nb::arg("kind"), nb::arg("lanes"), nb::arg("queue_depth"),
          nb::arg("register_buffers"), nb::arg("table"), nb::arg("faults").none(), nb::keep_alive<1, 8>(),
          nb::keep_alive<1, 9>());

  nb::class_<GioExecutor, Executor>(module, "GioExecutor", "The I/O kernel, on a GPU or on threads.")
      .def(
          "__init__",
          [](GioExecutor* self, const Layout& layout, const Devices& devices, int gpu, uint64_t stream, bool model,
             bool prp, bool uring, uint32_t threads, uint32_t queue_depth, uint64_t pinned_bytes, uint32_t blocks,
             uint32_t issuers, uint32_t movers, uint32_t lanes, uint32_t iocbs, const SlotTable* table,
             FaultInjector* faults) {
            GioOptions options;
            options.cuda = gpu >= 0;
            options.device = gpu;
            options.stream = stream;
            options.model = model;
            options.pointer = prp ? nvme::DataPointer::Prp : nvme::DataPointer::Sgl;
            options.uring = uring;
            options.threads = threads;
            options.depth = queue_depth;
            options.pinned_bytes = pinned_bytes;
            options.queue.blocks = blocks;
            options.queue.issuers_per_block = issuers;
            options.queue.movers_per_block = movers;
            options.queue.lanes = lanes;
            options.queue.depth = iocbs;
            new (self) GioExecutor(layout, files_of(devices), options, table, faults);
          },
          nb::arg("layout"), nb::arg("devices"), nb::arg("gpu"), nb::arg("stream"), nb::arg("model"), nb::arg("prp"),
          nb::arg("uring"), nb::arg("threads"), nb::arg("queue_depth"), nb::arg("pinned_bytes"), nb::arg("blocks"),
          nb::arg("issuers"), nb::arg("movers"), nb::arg("lanes"), nb::arg("iocbs"), nb::arg("table"),
          nb::arg("faults").none(), nb::keep_alive<1, 17>(), nb::keep_alive<1, 18>(),
          "gpu: its index, or -1 = threads. stream: CUstream of the I/O domain, 0 = one of its own. blocks: thread "
          "blocks of the I/O kernel, each with issuers + movers warps. lanes: commands in flight per issuing warp. "
          "iocbs: depth of the ring.")
      .def_prop_ro("pinned_bytes", &GioExecutor::pinned_bytes);
  module.def("probe_cuda", &gio::probe_cuda, nb::call_guard<nb::gil_scoped_release>(),
             "Empty when a CUDA device can be used, else why not.");

  module.def("raw_transfer", &raw, nb::arg("fds"), nb::arg("offsets"), nb::arg("addresses"), nb::arg("bytes"),
             nb::arg("write"), nb::arg("threads"), nb::arg("depth"), nb::arg("memory"),
             "(wall, processor) seconds that plain io_uring takes for these ranges: the benchmarks' baseline.");
}

}  // namespace tutti::bindings
