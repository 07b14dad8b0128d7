// What the owner of queue pairs asks of a controller that is software.
#pragma once

#include <cstdint>

namespace tutti::nvme {

class SoftController {
 public:
  virtual ~SoftController() = default;
  // Threads poll the doorbells while there may be commands, and sleep otherwise.
  virtual void awake(bool on) = 0;
  // Returns when nothing of this queue's commands can touch memory any more; they never complete.
  virtual void abort(uint32_t queue) = 0;
  // Ends the threads; what hangs is given up.
  virtual void stop() = 0;
};

}  // namespace tutti::nvme
