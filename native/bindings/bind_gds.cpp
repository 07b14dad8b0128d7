#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <tuple>

#include "arrays.h"
#include "tutti/gds/probe.h"

namespace tutti::bindings {

void bind_gds(nb::module_& module) {
  module.def(
      "find_cufile",
      [](const std::string& library) {
        const nb::gil_scoped_release release;
        const CufileLibrary found = find_cufile(library);
        return std::make_tuple(found.error, found.version);
      },
      nb::arg("library"), "(why cuFile can't be loaded or an empty text, its version or an empty text).");
  module.def(
      "try_cufile",
      [](const std::string& library, const std::string& cuda_library, const std::vector<int>& fds) {
        const nb::gil_scoped_release release;
        const CufileTrial trial = try_cufile(library, cuda_library, fds);
        return std::make_tuple(trial.driver_error, trial.file_errors);
      },
      nb::arg("library"), nb::arg("cuda_library"), nb::arg("fds"),
      "Opens cuFile's driver and registers files: (the driver's error, one error per file), empty texts where it "
      "worked. "
      "For a process of its own.");
}

}  // namespace tutti::bindings
