// How a controller that is software moves data: plain copies, or a kernel where the memory is a GPU's.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

namespace tutti::nvme {

struct CopyPart {
  uint64_t source;
  uint64_t target;
  uint64_t bytes;
};

// Used by one thread.
class CopyEngine {
 public:
  virtual ~CopyEngine() = default;
  // Starts to copy; false when it has no room (poll first). `parts` may be changed after the call.
  virtual bool begin(uint32_t tag, const std::vector<CopyPart>& parts) = 0;
  // A copy that has ended, or UINT32_MAX.
  virtual uint32_t poll() = 0;
};
std::unique_ptr<CopyEngine> make_host_copy_engine();

}  // namespace tutti::nvme
