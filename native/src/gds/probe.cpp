#include "tutti/gds/probe.h"

#include <stdexcept>

#include "../gpu/cuda_driver.h"
#include "cufile_library.h"

namespace tutti {
namespace {

// Holds a GPU's primary context current, where there is a GPU. Without one cuFile says itself what it misses.
class FirstGpu {
 public:
  explicit FirstGpu(const std::string& library) {
    std::string why;
    driver_ = cuda::Driver::load(library, why);
    if (driver_ == nullptr || driver_->device_get(&device_, 0) != cuda::kSuccess) {
      return;
    }
    cuda::Context context = nullptr;
    retained_ = driver_->primary_context_retain(&context, device_) == cuda::kSuccess;
    current_ = retained_ && driver_->context_push(context) == cuda::kSuccess;
  }
  ~FirstGpu() {
    cuda::Context context = nullptr;
    if (current_) {
      driver_->context_pop(&context);
    }
    if (retained_) {
      driver_->primary_context_release(device_);
    }
  }
  FirstGpu(const FirstGpu&) = delete;
  FirstGpu& operator=(const FirstGpu&) = delete;

 private:
  std::unique_ptr<cuda::Driver> driver_;
  cuda::Device device_ = 0;
  bool retained_ = false, current_ = false;
};

}  // namespace

CufileLibrary find_cufile(const std::string& library) {
  CufileLibrary found;
  if (const auto loaded = cufile::Library::load(library, found.error); loaded != nullptr) {
    found.version = loaded->version();
  }
  return found;
}

CufileTrial try_cufile(const std::string& library, const std::string& cuda_library, const std::vector<int>& fds) {
  CufileTrial trial;
  const FirstGpu gpu(cuda_library);
  try {
    const auto session = cufile::Session::open(library);
    for (const int fd : fds) {
      cufile::Handle handle = nullptr;
      const auto error = session->library().register_file(fd, handle);
      trial.file_errors.push_back(
          error.code == cufile::kSuccess ? "" : "cuFileHandleRegister failed: " + cufile::error_text(error));
      if (error.code == cufile::kSuccess) {
        session->library().handle_deregister(handle);
      }
    }
  } catch (const std::runtime_error& error) {
    trial.driver_error = error.what();
  }
  return trial;
}

}  // namespace tutti
