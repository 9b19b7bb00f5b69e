#include "io/file.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <utility>
#include <vector>

#include "io/arena.h"

namespace stoker::io {
namespace {

constexpr std::size_t kBounceBytes = std::size_t{4} << 20;
constexpr std::size_t kCheckpointBytes = std::size_t{64} << 20;

struct FreeDeleter {
  void operator()(void* memory) const { std::free(memory); }
};
using AlignedBuffer = std::unique_ptr<std::uint8_t, FreeDeleter>;

AlignedBuffer aligned_buffer(std::size_t nbytes) {
  void* memory = nullptr;
  if (posix_memalign(&memory, kBlockBytes, nbytes) != 0) throw std::bad_alloc();
  return AlignedBuffer(static_cast<std::uint8_t*>(memory));
}

int open_read_only(const std::string& path, int flags) {
  for (;;) {
    const int fd = ::open(path.c_str(), O_RDONLY | O_CLOEXEC | flags);
    if (fd >= 0 || errno != EINTR) return fd;
  }
}

// One read that repeats only interrupted calls. Returns bytes or -errno.
std::int64_t read_once(int fd, std::uint8_t* to, std::size_t length, std::uint64_t offset) {
  for (;;) {
    const ssize_t got = pread(fd, to, length, static_cast<off_t>(offset));
    if (got >= 0) return got;
    if (errno != EINTR) return -errno;
  }
}

#if !defined(__APPLE__)
// Some file systems take O_DIRECT at open and refuse the reads.
bool direct_reads_work(int fd) {
  const AlignedBuffer block = aligned_buffer(kBlockBytes);
  return read_once(fd, block.get(), kBlockBytes, 0) != -EINVAL;
}
#endif

// Returns a descriptor that bypasses the page cache, or -1 where the file system refuses.
int open_direct(const std::string& path) {
#if defined(__APPLE__)
  const int fd = open_read_only(path, 0);
  if (fd < 0) throw FileError(errno, path);
  if (fcntl(fd, F_NOCACHE, 1) == 0) return fd;
  ::close(fd);
  return -1;
#else
  const int fd = open_read_only(path, O_DIRECT);
  if (fd < 0) {
    if (errno == EINVAL) return -1;
    throw FileError(errno, path);
  }
  if (direct_reads_work(fd)) return fd;
  ::close(fd);
  return -1;
#endif
}

void forget_range(int fd, std::uint64_t offset, std::size_t length) {
#if defined(POSIX_FADV_DONTNEED)
  posix_fadvise(fd, static_cast<off_t>(offset), static_cast<off_t>(length), POSIX_FADV_DONTNEED);
#else
  (void)fd, (void)offset, (void)length;
#endif
}

std::size_t round_up(std::size_t value) { return (value + kBlockBytes - 1) / kBlockBytes * kBlockBytes; }

// Up to one bounce buffer's worth at `offset`. Direct reads cover whole blocks, so the extent is widened to them.
std::size_t read_piece(const File& file, std::uint8_t* bounce, std::uint64_t offset, std::size_t length, std::uint8_t* to) {
  const bool in_place = !file.direct() || (offset % kBlockBytes == 0 && length >= kBlockBytes &&
                                           reinterpret_cast<std::uintptr_t>(to) % kBlockBytes == 0);
  if (in_place) {
    const std::size_t want = file.direct() ? length / kBlockBytes * kBlockBytes : length;
    const std::int64_t got = read_once(file.fd(), to, want, offset);
    if (got < 0) throw FileError(static_cast<int>(-got), file.path());
    return static_cast<std::size_t>(got);
  }
  const std::size_t lead = offset % kBlockBytes;
  const std::int64_t got = read_once(file.fd(), bounce, std::min(kBounceBytes, round_up(lead + length)), offset - lead);
  if (got < 0) throw FileError(static_cast<int>(-got), file.path());
  if (static_cast<std::size_t>(got) <= lead) return 0;
  const std::size_t useful = std::min(length, static_cast<std::size_t>(got) - lead);
  std::memcpy(to, bounce + lead, useful);
  return useful;
}

}  // namespace

File::File(std::string path, bool direct) : path_(std::move(path)) {
  struct stat status {};
  if (stat(path_.c_str(), &status) != 0) throw FileError(errno, path_);
  if (S_ISDIR(status.st_mode)) throw FileError(EISDIR, path_);
  if (!S_ISREG(status.st_mode) && !S_ISBLK(status.st_mode)) throw FileError(EINVAL, path_);
  if (direct) fd_ = open_direct(path_);
  direct_ = fd_ >= 0;
  if (fd_ < 0) fd_ = open_read_only(path_, 0);
  if (fd_ < 0) throw FileError(errno, path_);
}

File::File(File&& other) noexcept
    : path_(std::move(other.path_)), fd_(std::exchange(other.fd_, -1)), direct_(other.direct_) {}

File::~File() { close(); }

void File::close() {
  if (fd_ >= 0) ::close(std::exchange(fd_, -1));
}

std::uint64_t File::nbytes() const {
  const off_t end = lseek(fd_, 0, SEEK_END);  // block devices too, where fstat says 0
  if (end < 0) throw FileError(errno, path_);
  return static_cast<std::uint64_t>(end);
}

bool read_file_into(const std::string& path, std::uint64_t offset, std::size_t length, std::uint8_t* to,
                    const std::function<void()>& checkpoint) {
  const File file(path, true);
  const std::shared_ptr<Arena> bounce = file.direct() ? Arena::create(kBounceBytes, true) : nullptr;
  std::size_t since_checkpoint = 0;
  for (std::size_t done = 0; done < length;) {
    const std::size_t want = std::min(length - done, kBounceBytes);
    const std::size_t got = read_piece(file, bounce ? bounce->data() : nullptr, offset + done, want, to + done);
    if (got == 0) throw ShortRead(done);
    // A direct read that stops inside a block stopped at the end of the file; going on from there would be unaligned
    // in place but not through the bounce buffer, which starts at a block again and then finds nothing more.
    if (!file.direct()) forget_range(file.fd(), offset + done, got);
    done += got;
    since_checkpoint += got;
    if (since_checkpoint >= kCheckpointBytes) {
      since_checkpoint = 0;
      checkpoint();
    }
  }
  return file.direct();
}

void drop_cache(const std::string& path) {
  const File file(path, false);
#if defined(POSIX_FADV_DONTNEED)
  if (fsync(file.fd()) != 0) throw FileError(errno, path);  // dirty pages would stay
  const int error = posix_fadvise(file.fd(), 0, 0, POSIX_FADV_DONTNEED);
  if (error != 0) throw FileError(error, path);
#else
  throw FileError(ENOTSUP, path);
#endif
}

std::size_t cached_bytes(const std::string& path) {
  const File file(path, false);
  const std::size_t nbytes = file.nbytes();
  if (nbytes == 0) return 0;
  void* view = mmap(nullptr, nbytes, PROT_READ, MAP_SHARED, file.fd(), 0);
  if (view == MAP_FAILED) throw FileError(errno, path);
  const auto page = static_cast<std::size_t>(sysconf(_SC_PAGESIZE));
#if defined(__APPLE__)
  std::vector<char> present((nbytes + page - 1) / page);
#else
  std::vector<unsigned char> present((nbytes + page - 1) / page);
#endif
  const int rc = mincore(view, nbytes, present.data());
  const int error = errno;
  munmap(view, nbytes);
  if (rc != 0) throw FileError(error, path);
  return page * static_cast<std::size_t>(std::count_if(present.begin(), present.end(), [](auto p) { return p & 1; }));
}

}  // namespace stoker::io
