//! Loop devices, small filesystems and scratch files for tests. Everything goes away with the value.
#![allow(dead_code, reason = "each test file uses its part")]

use std::fs::{self, File};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::process::Command;

/// Whether loop devices and mounts are possible: the superuser's, where the kernel has them.
pub fn possible() -> bool {
    let root = fs::metadata("/proc/self").unwrap().uid() == 0;
    let possible = root && fs::exists("/dev/loop-control").unwrap();
    if !possible {
        eprintln!("not run: loop devices and mounts need root and /dev/loop-control");
    }
    possible
}

/// A folder on the filesystem of the build folder, which is a real one.
pub fn scratch() -> tempfile::TempDir {
    tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap()
}

/// Runs a program to its end; panics with its messages when it fails.
pub fn run(program: &str, arguments: &[&str]) -> String {
    let output = Command::new(program).args(arguments).output().unwrap();
    let messages = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{program} {arguments:?}: {messages}");
    String::from_utf8(output.stdout).unwrap().trim().to_owned()
}

/// A loop device on a sparse file of its own.
pub struct LoopDrive {
    node: PathBuf,
    file: PathBuf,
    _folder: tempfile::TempDir,
}

impl LoopDrive {
    /// Attaches a device of `bytes` with sectors of `sector` bytes.
    pub fn new(bytes: u64, sector: u32) -> Self {
        Self::attach(bytes, &["-b", &sector.to_string()])
    }

    /// Attaches a device of `bytes` that refuses writes.
    pub fn read_only(bytes: u64) -> Self {
        Self::attach(bytes, &["-r"])
    }

    fn attach(bytes: u64, extra: &[&str]) -> Self {
        let folder = scratch();
        let file = folder.path().join("drive");
        File::create_new(&file).unwrap().set_len(bytes).unwrap();
        let arguments = [&["-f", "--show"], extra, &[file.to_str().unwrap()]].concat();
        let node = PathBuf::from(run("losetup", &arguments));
        Self { node, file, _folder: folder }
    }

    /// The device node.
    pub fn node(&self) -> &Path {
        &self.node
    }

    /// The file below it.
    pub fn file(&self) -> File {
        File::options().read(true).write(true).open(&self.file).unwrap()
    }
}

impl Drop for LoopDrive {
    /// Detached now, or when its last user closes it.
    fn drop(&mut self) {
        let _ = Command::new("losetup").arg("-d").arg(&self.node).status();
    }
}

/// A mounted filesystem.
pub struct Mount {
    folder: tempfile::TempDir,
}

impl Mount {
    /// Mounts with these arguments of `mount`, to which the folder is added.
    pub fn new(arguments: &[&str]) -> Self {
        let folder = scratch();
        let arguments = [arguments, &[folder.path().to_str().unwrap()]].concat();
        run("mount", &arguments);
        Self { folder }
    }

    /// Where it is mounted.
    pub fn path(&self) -> &Path {
        self.folder.path()
    }
}

impl Drop for Mount {
    fn drop(&mut self) {
        let _ = Command::new("umount").arg("-l").arg(self.path()).status();
    }
}
