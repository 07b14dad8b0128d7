// In a build without CUDA.
#include <stdexcept>

#include "tutti/gio/accelerator.h"

namespace tutti::gio {

std::string probe_cuda() { return "built without CUDA (nvcc was not found when tutti-mooncake was installed)"; }

std::unique_ptr<Accelerator> make_cuda_accelerator(int /*device*/, uint64_t /*stream*/) {
  throw std::runtime_error(probe_cuda());
}

}  // namespace tutti::gio
