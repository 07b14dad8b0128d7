// The cuFile library's functions, found at run time, its error codes in words and as our statuses, and an open driver
// session.
//
// Invariant: in a library object every function is set but get_version and driver_get_properties, which may be null.
#pragma once

#include <atomic>
#include <memory>
#include <string>
#include <vector>

#include "tutti/gds/cufile_abi.h"
#include "tutti/shared_library.h"
#include "tutti/status.h"

namespace tutti::cufile {

// "CU_FILE_HANDLE_NOT_REGISTERED" of 5027; null for a number that no version so far has.
const char* error_name(int code) noexcept;
// "CU_FILE_HANDLE_NOT_REGISTERED (5027)", and the number of CUDA's error where it is one.
std::string error_text(Error error);
// What an operation's error means for whoever asked for the I/O.
Status status_of_error(int code) noexcept;
// What a batch event means for a transfer of `wanted` bytes. The event must be an end: neither waiting nor pending.
Status status_of_event(const BatchEvent& event, uint64_t wanted) noexcept;
constexpr bool is_end(int event_status) noexcept { return event_status != kWaiting && event_status != kPending; }

struct Library {
  // Null, and why, where the library or one of its functions isn't there.
  static std::unique_ptr<Library> load(const std::string& path, std::string& why);

  // "1.15.0"; empty where the library doesn't tell.
  [[nodiscard]] std::string version() const;
  // Entries that one batch may have; 0 where the library doesn't tell.
  [[nodiscard]] unsigned max_batch_entries() const;
  [[nodiscard]] Error register_file(int fd, Handle& handle) const;

  explicit Library(const std::string& path) : shared(path) {}
  SharedLibrary shared;
  DriverOpen* driver_open = nullptr;
  DriverClose* driver_close = nullptr;
  DriverGetProperties* driver_get_properties = nullptr;
  GetVersion* get_version = nullptr;
  HandleRegister* handle_register = nullptr;
  HandleDeregister* handle_deregister = nullptr;
  BufferRegister* buffer_register = nullptr;
  BufferDeregister* buffer_deregister = nullptr;
  BatchSetUp* batch_set_up = nullptr;
  BatchSubmit* batch_submit = nullptr;
  BatchGetStatus* batch_get_status = nullptr;
  BatchCancel* batch_cancel = nullptr;
  BatchDestroy* batch_destroy = nullptr;
};

// An open driver, one per process and library: all lanes share it, and the last to go closes it. Where other code had
// it open before, it isn't ours to close.
class Session {
 public:
  // Thread-safe. Throws std::runtime_error: the library isn't there, or its driver doesn't open.
  static std::shared_ptr<Session> open(const std::string& path);
  ~Session();
  Session(const Session&) = delete;
  Session& operator=(const Session&) = delete;

  [[nodiscard]] const Library& library() const noexcept { return *library_; }
  // Leaves the driver open for good: the hardware may still use what was registered.
  void leave_open() noexcept { ours_ = false; }

 private:
  explicit Session(const std::string& path);

  std::unique_ptr<Library> library_;
  std::atomic<bool> ours_{false};
};

}  // namespace tutti::cufile
