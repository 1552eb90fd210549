"""A FUSE file system over a directory, in which every call takes some milliseconds and files cannot be exchanged.

  slow_files.py DIRECTORY MOUNT_POINT MILLISECONDS

It needs fusepy (Debian: python3-fusepy) and ends when it is unmounted.
"""

import errno
import os
import sys
import time

try:
    from fuse import FUSE, FuseOSError, Operations
except ImportError:
    from fusepy import FUSE, FuseOSError, Operations


class SlowFiles(Operations):
    use_ns = True

    def __init__(self, directory, delay):
        self.directory = directory
        self.delay = delay

    def __call__(self, operation, *arguments):
        if self.delay and operation in ("open", "create", "write", "fsync", "rename", "unlink", "mkdir"):
            time.sleep(self.delay)
        if not hasattr(self, operation):
            raise FuseOSError(errno.ENOSYS)
        try:
            return getattr(self, operation)(*arguments)
        except OSError as error:
            raise FuseOSError(error.errno) from error

    def path(self, path):
        return os.path.join(self.directory, path.lstrip("/"))

    def getattr(self, path, handle=None):
        found = os.lstat(self.path(path))
        names = ("st_atime_ns", "st_ctime_ns", "st_gid", "st_mode", "st_mtime_ns", "st_nlink", "st_size", "st_uid", "st_blocks")
        return {name.replace("_ns", ""): getattr(found, name) for name in names}

    def readdir(self, path, handle):
        return [".", "..", *os.listdir(self.path(path))]

    def readlink(self, path):
        return os.readlink(self.path(path))

    def symlink(self, target, source):
        os.symlink(source, self.path(target))

    def link(self, target, source):
        os.link(self.path(source), self.path(target))

    def mkdir(self, path, mode):
        os.mkdir(self.path(path), mode)

    def rmdir(self, path):
        os.rmdir(self.path(path))

    def unlink(self, path):
        os.unlink(self.path(path))

    def rename(self, old, new):
        os.rename(self.path(old), self.path(new))

    def chmod(self, path, mode):
        os.chmod(self.path(path), mode)

    def chown(self, path, user, group):
        os.chown(self.path(path), user, group)

    def utimens(self, path, times=None):
        os.utime(self.path(path), ns=times)

    def statfs(self, path):
        found = os.statvfs(self.path(path))
        return {name: getattr(found, name) for name in ("f_bavail", "f_bfree", "f_blocks", "f_bsize", "f_files", "f_ffree",
                                                        "f_frsize", "f_namemax")}

    def create(self, path, mode, fi=None):
        return os.open(self.path(path), os.O_RDWR | os.O_CREAT | os.O_EXCL, mode)

    def open(self, path, flags):
        return os.open(self.path(path), flags & ~os.O_DIRECT)

    def read(self, path, size, offset, handle):
        return os.pread(handle, size, offset)

    def write(self, path, data, offset, handle):
        return os.pwrite(handle, data, offset)

    def truncate(self, path, length, handle=None):
        os.truncate(self.path(path), length)

    def fsync(self, path, data_only, handle):
        os.fsync(handle)

    def fsyncdir(self, path, data_only, handle):
        pass

    def flush(self, path, handle):
        pass

    def release(self, path, handle):
        os.close(handle)


if __name__ == "__main__":
    FUSE(SlowFiles(sys.argv[1], float(sys.argv[3]) / 1000), sys.argv[2], foreground=True, nothreads=False, raw_fi=False)
