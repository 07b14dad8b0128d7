// The few declarations of NVIDIA's cuFile interface (GPUDirect Storage) that this project uses, under names of our own,
// so that it compiles where the library is not installed. Where its header is, native/src/gds/cufile_library.cpp
// compares sizes, offsets and values.
//
// Source: cuFile API Reference Guide, sections driver, file handle, buffer registration, batch.
#pragma once

#include <sys/types.h>
#include <time.h>

#include <cstddef>
#include <cstdint>

namespace tutti::cufile {

// CUfileError_t. `cuda` is a CUresult, of meaning only with kCudaDriverError.
struct Error {
  int code;
  int cuda;
};

inline constexpr int kSuccess = 0;
inline constexpr int kErrorBase = 5000;  // operation errors are above; a transfer's result has them negated
inline constexpr int kCudaDriverError = 5011;
inline constexpr int kDriverAlreadyOpen = 5026;

using Handle = void*;       // CUfileHandle_t
using BatchHandle = void*;  // CUfileBatchHandle_t

// CUfileDescr_t
struct Descriptor {
  int type;
  union {
    int fd;
    void* other;
  } handle;
  const void* file_system_operations;
};
inline constexpr int kOpaqueFd = 1;  // CU_FILE_HANDLE_TYPE_OPAQUE_FD

// CUfileIOParams_t
struct BatchEntry {
  int mode;
  void* buffer;
  off_t file_offset;
  off_t buffer_offset;
  size_t bytes;
  Handle file;
  int opcode;
  void* cookie;
};
inline constexpr int kBatchMode = 1;
inline constexpr int kOpRead = 0;
inline constexpr int kOpWrite = 1;

// CUfileIOEvents_t
struct BatchEvent {
  void* cookie;
  int status;
  size_t result;  // bytes, or a negative error
};
inline constexpr int kWaiting = 0x01;
inline constexpr int kPending = 0x02;
inline constexpr int kInvalid = 0x04;
inline constexpr int kCanceled = 0x08;
inline constexpr int kComplete = 0x10;
inline constexpr int kTimeout = 0x20;
inline constexpr int kFailed = 0x40;

// CUfileDrvProps_t, and room for what later versions append.
struct DriverProperties {
  unsigned nvidia_fs_version[2];
  size_t poll_threshold, max_direct_io;
  unsigned status_flags, control_flags;
  unsigned feature_flags;
  unsigned max_device_cache_kib;
  unsigned per_buffer_cache_kib;
  unsigned max_pinned_kib;
  unsigned max_batch_entries;
  unsigned max_batch_timeout_ms;
  unsigned char later[64];
};

using DriverOpen = Error();
using DriverClose = Error();
using DriverGetProperties = Error(DriverProperties* properties);
using GetVersion = Error(int* version);
using HandleRegister = Error(Handle* handle, Descriptor* descriptor);
using HandleDeregister = void(Handle handle);
using BufferRegister = Error(const void* base, size_t bytes, int flags);
using BufferDeregister = Error(const void* base);
using BatchSetUp = Error(BatchHandle* batch, unsigned entries);
using BatchSubmit = Error(BatchHandle batch, unsigned count, BatchEntry* entries, unsigned flags);
using BatchGetStatus = Error(BatchHandle batch, unsigned least, unsigned* count, BatchEvent* events, timespec* timeout);
using BatchCancel = Error(BatchHandle batch);
using BatchDestroy = void(BatchHandle batch);

}  // namespace tutti::cufile
