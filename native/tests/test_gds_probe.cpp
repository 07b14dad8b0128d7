// The trial of cuFile against the recording libraries: its answers, the GPU context around it, and nothing left behind.
#include "tutti/gds/probe.h"

#include <cstdlib>
#include <string>

#include "check.h"
#include "fakes/beside.h"
#include "fakes/fake_cuda.h"
#include "fakes/fake_cufile.h"

using namespace tutti;

int main() {
  setenv("CUFILE_LOGFILE_PATH", "/dev/null", 1);
  const std::string cuda = testing::library_beside("fake_cuda");
  const std::string cufile = testing::library_beside("fake_cufile");
  decltype(&fake_cuda_log) cuda_log = nullptr;
  decltype(&fake_cuda_alive) cuda_alive = nullptr;
  decltype(&fake_cufile_reset) reset = nullptr;
  decltype(&fake_cufile_fail) fail = nullptr;
  decltype(&fake_cufile_alive) cufile_alive = nullptr;
  testing::command(cuda, "fake_cuda_log", cuda_log);
  testing::command(cuda, "fake_cuda_alive", cuda_alive);
  testing::command(cufile, "fake_cufile_reset", reset);
  testing::command(cufile, "fake_cufile_fail", fail);
  testing::command(cufile, "fake_cufile_alive", cufile_alive);

  const CufileLibrary found = find_cufile(cufile);
  CHECK(found.error.empty() && found.version == "1.15.0");
  CHECK(find_cufile("/nonexistent.so").error.find("/nonexistent.so") == 0);
  CHECK(find_cufile("libc.so.6").error.find("libc.so.6 has no cuFileDriverOpen, cuFileDriverClose, ") == 0);

  fail("cuFileHandleRegister", 2, 5027);
  const CufileTrial trial = try_cufile(cufile, cuda, {10, 11, 12});
  CHECK(trial.driver_error.empty() && trial.file_errors.size() == 3);
  CHECK(trial.file_errors[0].empty() && trial.file_errors[2].empty());
  CHECK(trial.file_errors[1] == "cuFileHandleRegister failed: CU_FILE_HANDLE_NOT_REGISTERED (5027)");
  CHECK(std::string(cuda_log()).find("cuDevicePrimaryCtxRetain(40)\ncuCtxPushCurrent(119)\ncuCtxPopCurrent()\n") !=
        std::string::npos);
  CHECK(cuda_alive() == 0 && cufile_alive() == 0);

  reset();
  fail("cuFileDriverOpen", 1, 5011);
  const CufileTrial closed = try_cufile(cufile, "/nonexistent.so", {10});
  CHECK(closed.driver_error == "cuFileDriverOpen failed: CU_FILE_CUDA_DRIVER_ERROR (5011), CUDA error 2");
  CHECK(closed.file_errors.empty() && cufile_alive() == 0);
}
