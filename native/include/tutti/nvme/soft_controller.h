// Controllers that are software: threads that serve queue pairs, awake while there may be commands. A class derived
// from this calls stop() in its destructor, as its threads use its members.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <thread>
#include <vector>

namespace tutti::nvme {

class SoftController {
 public:
  virtual ~SoftController() = default;
  SoftController() = default;
  SoftController(const SoftController&) = delete;
  SoftController& operator=(const SoftController&) = delete;

  // Threads poll the doorbells while there may be commands, and sleep otherwise.
  void awake(bool on) {
    if (awake_.load(std::memory_order_relaxed) == on) {
      return;
    }
    const std::lock_guard lock(mutex_);
    awake_.store(on, std::memory_order_release);
    changed_.notify_all();
  }
  // Returns when nothing of this queue's commands can touch memory any more; they never complete.
  virtual void abort(uint32_t queue) = 0;
  // Ends the threads; what hangs is given up. Any number of times.
  void stop() {
    {
      const std::lock_guard lock(mutex_);
      stopping_.store(true, std::memory_order_release);
      changed_.notify_all();
    }
    for (auto& thread : threads_) {
      thread.join();
    }
    threads_.clear();
  }

 protected:
  [[nodiscard]] bool is_awake() const noexcept { return awake_.load(std::memory_order_acquire); }
  [[nodiscard]] bool stopping() const noexcept { return stopping_.load(std::memory_order_acquire); }
  // Sleeps until awake or stopping, at most `longest`.
  void wait_awake(std::chrono::milliseconds longest) {
    std::unique_lock lock(mutex_);
    changed_.wait_for(lock, longest, [this] { return is_awake() || stopping(); });
  }

  std::mutex mutex_;
  std::vector<std::thread> threads_;

 private:
  std::condition_variable changed_;
  std::atomic<bool> awake_{false};
  std::atomic<bool> stopping_{false};
};

}  // namespace tutti::nvme
