#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>

#include "arrays.h"
#include "tutti/checksum.h"
#include "tutti/lane_executor.h"
#include "tutti/status.h"

namespace tutti::bindings {
namespace {

using Bytes = nb::ndarray<const uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

}  // namespace

NB_MODULE(_native, module) {
  nb::set_leak_warnings(false);  // at interpreter exit they tell of an unhandled exception's frames, not of leaks
  module.doc() =
      "Native core of tutti_mooncake: layout, rings, executors, index. Private: the package's modules are the "
      "interface.";

  nb::enum_<Status>(module, "Status", nb::is_arithmetic())
      .value("OK", Status::Ok)
      .value("NOT_FOUND", Status::NotFound)
      .value("REJECTED", Status::Rejected)
      .value("EXISTS", Status::Exists)
      .value("RETRY", Status::Retry)
      .value("DEVICE_ERROR", Status::DeviceError)
      .value("SHORT_IO", Status::ShortIo)
      .value("NO_SPACE", Status::NoSpace)
      .value("CHECKSUM_ERROR", Status::ChecksumError)
      .value("STALE", Status::Stale)
      .value("TIMEOUT", Status::Timeout)
      .value("CANCELLED", Status::Cancelled)
      .value("BAD_STATE", Status::BadState);

  module.attr("CHECKSUM_MULTILINEAR64") = kChecksumMultilinear64;
  module.def("checksum_variant", &checksum_variant, "Vector instructions that the checksum uses on this machine.");
  module.def(
      "multilinear64",
      [](const Bytes& data) {
        const nb::gil_scoped_release release;
        return multilinear64(data.data(), data.shape(0));
      },
      nb::arg("data"), "Checksum of a byte array (docs/format.md).");
  module.def(
      "multilinear64_rows",
      [](const nb::ndarray<const uint8_t, nb::ndim<2>, nb::c_contig, nb::device::cpu>& rows) {
        std::vector<uint64_t> sums(rows.shape(0));
        {
          const nb::gil_scoped_release release;
          for (size_t row = 0; row < sums.size(); ++row) {
            sums[row] = multilinear64(rows.data() + row * rows.shape(1), rows.shape(1));
          }
        }
        return to_numpy(std::move(sums));
      },
      nb::arg("rows"), "Checksum of each row of a byte array of two dimensions.");
  module.def(
      "multilinear64_scalar",
      [](const Bytes& data) {
        const nb::gil_scoped_release release;
        return multilinear64_scalar(data.data(), data.shape(0));
      },
      nb::arg("data"), "The same value from plain C++: the reference of the tests.");
  module.def("probe_uring", &probe_uring, nb::call_guard<nb::gil_scoped_release>(),
             "Empty when io_uring can be used in this process, else why not.");
  module.def(
      "direct_io_alignment",
      [](int fd) {
        const auto [memory, offset] = direct_io_alignment(fd);
        return nb::make_tuple(memory, offset);
      },
      nb::arg("fd"),
      "(memory, offset) alignment in bytes that direct I/O on an open file wants; (0, 0) = the kernel doesn't say.");

  bind_index(module);
  bind_holders(module);
  bind_io(module);
  bind_gds(module);
  bind_partition(module);
}

}  // namespace tutti::bindings
