#include "cufile_library.h"

#include <algorithm>
#include <array>
#include <map>
#include <mutex>
#include <stdexcept>

#if __has_include(<cufile.h>) && __has_include(<cuda.h>)
#include <cufile.h>
namespace tutti::cufile {
static_assert(sizeof(Error) == sizeof(CUfileError_t) && offsetof(Error, cuda) == offsetof(CUfileError_t, cu_err));
static_assert(sizeof(Descriptor) == sizeof(CUfileDescr_t) &&
              offsetof(Descriptor, handle) == offsetof(CUfileDescr_t, handle) &&
              offsetof(Descriptor, file_system_operations) == offsetof(CUfileDescr_t, fs_ops));
static_assert(sizeof(BatchEntry) == sizeof(CUfileIOParams_t) && sizeof(BatchEvent) == sizeof(CUfileIOEvents_t));
static_assert(offsetof(BatchEntry, buffer) == offsetof(CUfileIOParams_t, u.batch.devPtr_base));
static_assert(offsetof(BatchEntry, file_offset) == offsetof(CUfileIOParams_t, u.batch.file_offset));
static_assert(offsetof(BatchEntry, buffer_offset) == offsetof(CUfileIOParams_t, u.batch.devPtr_offset));
static_assert(offsetof(BatchEntry, bytes) == offsetof(CUfileIOParams_t, u.batch.size));
static_assert(offsetof(BatchEntry, file) == offsetof(CUfileIOParams_t, fh));
static_assert(offsetof(BatchEntry, opcode) == offsetof(CUfileIOParams_t, opcode));
static_assert(offsetof(BatchEntry, cookie) == offsetof(CUfileIOParams_t, cookie));
static_assert(offsetof(BatchEvent, status) == offsetof(CUfileIOEvents_t, status));
static_assert(offsetof(BatchEvent, result) == offsetof(CUfileIOEvents_t, ret));
static_assert(sizeof(DriverProperties) >= sizeof(CUfileDrvProps_t));
static_assert(offsetof(DriverProperties, max_batch_entries) == offsetof(CUfileDrvProps_t, max_batch_io_size));
static_assert(kWaiting == CUFILE_WAITING && kPending == CUFILE_PENDING && kInvalid == CUFILE_INVALID);
static_assert(kCanceled == CUFILE_CANCELED && kComplete == CUFILE_COMPLETE && kTimeout == CUFILE_TIMEOUT);
static_assert(kFailed == CUFILE_FAILED && kBatchMode == CUFILE_BATCH && kOpRead == CUFILE_READ);
static_assert(kOpWrite == CUFILE_WRITE && kOpaqueFd == CU_FILE_HANDLE_TYPE_OPAQUE_FD);
static_assert(kErrorBase == CUFILEOP_BASE_ERR && kCudaDriverError == CU_FILE_CUDA_DRIVER_ERROR);
static_assert(kDriverAlreadyOpen == CU_FILE_DRIVER_ALREADY_OPEN);
}  // namespace tutti::cufile
#endif

namespace tutti::cufile {
namespace {

constexpr int kLastError = 5050;
// By number from 5001; the interface has no 5021 and no 5032.
constexpr std::array<const char*, kLastError - kErrorBase> kNames{
    "DRIVER_NOT_INITIALIZED",
    "DRIVER_INVALID_PROPS",
    "DRIVER_UNSUPPORTED_LIMIT",
    "DRIVER_VERSION_MISMATCH",
    "DRIVER_VERSION_READ_ERROR",
    "DRIVER_CLOSING",
    "PLATFORM_NOT_SUPPORTED",
    "IO_NOT_SUPPORTED",
    "DEVICE_NOT_SUPPORTED",
    "NVFS_DRIVER_ERROR",
    "CUDA_DRIVER_ERROR",
    "CUDA_POINTER_INVALID",
    "CUDA_MEMORY_TYPE_INVALID",
    "CUDA_POINTER_RANGE_ERROR",
    "CUDA_CONTEXT_MISMATCH",
    "INVALID_MAPPING_SIZE",
    "INVALID_MAPPING_RANGE",
    "INVALID_FILE_TYPE",
    "INVALID_FILE_OPEN_FLAG",
    "DIO_NOT_SET",
    nullptr,
    "INVALID_VALUE",
    "MEMORY_ALREADY_REGISTERED",
    "MEMORY_NOT_REGISTERED",
    "PERMISSION_DENIED",
    "DRIVER_ALREADY_OPEN",
    "HANDLE_NOT_REGISTERED",
    "HANDLE_ALREADY_REGISTERED",
    "DEVICE_NOT_FOUND",
    "INTERNAL_ERROR",
    "GETNEWFD_FAILED",
    nullptr,
    "NVFS_SETUP_ERROR",
    "IO_DISABLED",
    "BATCH_SUBMIT_FAILED",
    "GPU_MEMORY_PINNING_FAILED",
    "BATCH_FULL",
    "ASYNC_NOT_SUPPORTED",
    "INTERNAL_BATCH_SETUP_ERROR",
    "INTERNAL_BATCH_SUBMIT_ERROR",
    "INTERNAL_BATCH_GETSTATUS_ERROR",
    "INTERNAL_BATCH_CANCEL_ERROR",
    "NOMEM_ERROR",
    "IO_ERROR",
    "INTERNAL_BUF_REGISTER_ERROR",
    "HASH_OPR_ERROR",
    "INVALID_CONTEXT_ERROR",
    "NVFS_INTERNAL_DRIVER_ERROR",
    "BATCH_NOCOMPAT_ERROR",
    "IO_MAX_ERROR",
};

}  // namespace

const char* error_name(int code) noexcept {
  return code > kErrorBase && code <= kLastError ? kNames[static_cast<size_t>(code - kErrorBase - 1)] : nullptr;
}

std::string error_text(Error error) {
  const char* name = error_name(error.code);
  std::string text = name != nullptr ? std::string("CU_FILE_") + name : std::string("unknown cuFile error");
  text += " (" + std::to_string(error.code) + ")";
  if (error.code == kCudaDriverError) {
    text += ", CUDA error " + std::to_string(error.cuda);
  }
  return text;
}

Status status_of_error(int code) noexcept {
  switch (code) {
    case kSuccess:
      return Status::Ok;
    case 5037:  // BATCH_FULL
    case 5039:  // the four internal batch errors and NOMEM: documented as "retry later"
    case 5040:
    case 5041:
    case 5042:
    case 5043:
      return Status::Retry;
    case 5012:  // pointers, mappings and files that don't fit what was registered
    case 5013:
    case 5014:
    case 5015:
    case 5016:
    case 5017:
    case 5018:
    case 5019:
    case 5020:
    case 5022:
    case 5023:
    case 5024:
    case 5027:
    case 5028:
    case 5047:
      return Status::BadState;
    default:
      return Status::DeviceError;
  }
}

Status status_of_event(const BatchEvent& event, uint64_t wanted) noexcept {
  const auto result = static_cast<int64_t>(event.result);
  switch (event.status) {
    case kComplete:
    case kFailed:
      if (result < -kErrorBase) {
        return status_of_error(static_cast<int>(std::min<int64_t>(-result, INT32_MAX)));
      }
      if (event.status == kFailed && result >= 0) {
        return Status::DeviceError;
      }
      return result > static_cast<int64_t>(wanted) ? Status::DeviceError : status_of_result(result, wanted);
    case kCanceled:
      return Status::Cancelled;
    case kTimeout:
      return Status::Timeout;
    case kInvalid:
      return Status::BadState;
    default:
      return Status::DeviceError;
  }
}

std::unique_ptr<Library> Library::load(const std::string& path, std::string& why) {
  auto library = std::make_unique<Library>(path);
  if (!library->shared.loaded()) {
    why = library->shared.error();
    return nullptr;
  }
  std::string missing;
  const auto find = [&](const char* name, auto& function) {
    if (!library->shared.find(name, function)) {
      missing += (missing.empty() ? "" : ", ") + std::string(name);
    }
  };
  find("cuFileDriverOpen", library->driver_open);
  if (!library->shared.find("cuFileDriverClose_v2", library->driver_close)) {
    find("cuFileDriverClose", library->driver_close);
  }
  library->shared.find("cuFileDriverGetProperties", library->driver_get_properties);
  library->shared.find("cuFileGetVersion", library->get_version);
  find("cuFileHandleRegister", library->handle_register);
  find("cuFileHandleDeregister", library->handle_deregister);
  find("cuFileBufRegister", library->buffer_register);
  find("cuFileBufDeregister", library->buffer_deregister);
  find("cuFileBatchIOSetUp", library->batch_set_up);
  find("cuFileBatchIOSubmit", library->batch_submit);
  find("cuFileBatchIOGetStatus", library->batch_get_status);
  find("cuFileBatchIOCancel", library->batch_cancel);
  find("cuFileBatchIODestroy", library->batch_destroy);
  if (!missing.empty()) {
    why = path + " has no " + missing;
    return nullptr;
  }
  return library;
}

std::string Library::version() const {
  int number = 0;
  if (get_version == nullptr || get_version(&number).code != kSuccess || number <= 0) {
    return {};
  }
  return std::to_string(number / 1000) + "." + std::to_string(number % 1000 / 10) + "." + std::to_string(number % 10);
}

unsigned Library::max_batch_entries() const {
  DriverProperties properties{};
  if (driver_get_properties == nullptr || driver_get_properties(&properties).code != kSuccess) {
    return 0;
  }
  return properties.max_batch_entries;
}

Error Library::register_file(int fd, Handle& handle) const {
  Descriptor descriptor{};
  descriptor.type = kOpaqueFd;
  descriptor.handle.fd = fd;
  return handle_register(&handle, &descriptor);
}

// Counted under one lock, so that no lane's opening falls between the last one's end and its closing.
std::shared_ptr<Session> Session::open(const std::string& path) {
  struct Open {
    std::unique_ptr<Session> session;
    uint32_t users = 0;
  };
  static std::mutex mutex;
  static std::map<std::string, Open> all;
  const std::lock_guard<std::mutex> lock(mutex);
  Open& open = all[path];
  if (open.session == nullptr) {
    open.session.reset(new Session(path));
  }
  ++open.users;
  return {open.session.get(), [&open](Session*) {
            const std::lock_guard<std::mutex> closing(mutex);
            if (--open.users == 0) {
              open.session.reset();
            }
          }};
}

Session::Session(const std::string& path) {
  std::string why;
  library_ = Library::load(path, why);
  if (library_ == nullptr) {
    throw std::runtime_error("the cuFile library can't be used: " + why);
  }
  const Error error = library_->driver_open();
  if (error.code != kSuccess && error.code != kDriverAlreadyOpen) {
    throw std::runtime_error("cuFileDriverOpen failed: " + error_text(error));
  }
  ours_ = error.code == kSuccess;
}

Session::~Session() {
  if (ours_) {
    library_->driver_close();
  }
}

}  // namespace tutti::cufile
