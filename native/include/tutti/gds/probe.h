// Whether cuFile works here, found by trying: load the library, open its driver, register files.
//
// Call try_cufile in a process of its own: NVIDIA's libraries start threads, write a log file, print, and may take the
// process with them where a driver is broken.
#pragma once

#include <string>
#include <vector>

namespace tutti {

struct CufileLibrary {
  std::string error;    // why it can't be used; empty when it can
  std::string version;  // "1.15.0"; empty where it doesn't tell
};
// Loads the library; opens nothing.
CufileLibrary find_cufile(const std::string& library);

struct CufileTrial {
  std::string driver_error;              // empty when the driver opened
  std::vector<std::string> file_errors;  // one per file, empty when it was registered; none without a driver
};
// `fds`: as an executor would open them. Makes the first GPU's primary context current where there is one, as cuFile
// wants.
CufileTrial try_cufile(const std::string& library, const std::string& cuda_library, const std::vector<int>& fds);

}  // namespace tutti
