#include <nanobind/stl/string.h>

#include "arrays.h"
#include "tutti/gpu/partition.h"

namespace tutti::bindings {
namespace {

const char* kind_name(const SmPartition& partition) {
  switch (partition.kind()) {
    case PartitionKind::Green:
      return "green";
    case PartitionKind::Priority:
      return "priority";
    case PartitionKind::None:
      break;
  }
  return "none";
}

}  // namespace

void bind_partition(nb::module_& module) {
  nb::class_<SmPartition>(module, "SmPartition", "Two parts of one GPU's SMs, or the reason why there are none.")
      .def(
          "__init__",
          [](SmPartition* self, int device, uint32_t io_sms, const std::string& library) {
            const nb::gil_scoped_release release;
            new (self) SmPartition({device, io_sms, library});
          },
          nb::arg("device"), nb::arg("io_sms"), nb::arg("library"))
      .def(
          "close",
          [](SmPartition& self) {
            const nb::gil_scoped_release release;
            return self.close();
          },
          "Waits for the streams' work and gives everything back; what went wrong, or an empty text.")
      .def_prop_ro("kind", &kind_name)
      .def_prop_ro("reason", &SmPartition::reason)
      .def_prop_ro("io_sms", &SmPartition::io_sms)
      .def_prop_ro("compute_sms", &SmPartition::compute_sms)
      .def_prop_ro("device_sms", &SmPartition::device_sms)
      .def_prop_ro("io_stream", &SmPartition::io_stream, "CUstream as a number; 0 = none.")
      .def_prop_ro("compute_stream", &SmPartition::compute_stream, "CUstream as a number; 0 = none.");
}

}  // namespace tutti::bindings
