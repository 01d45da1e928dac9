//! From a path to a device: what is taken, what is made, what is refused and in which words. Nothing that is not ours
//! is ever changed.

mod drives;

use std::fs::{self, File};
use std::io::{Read, Seek, SeekFrom};
use std::os::fd::AsRawFd;
use std::os::unix::fs::{MetadataExt, PermissionsExt, symlink};
use std::os::unix::net::UnixListener;
use std::path::Path;
use std::time::{Duration, Instant};

use drives::{LoopDrive, Mount};
use rustix::fs::{MemfdFlags, SealFlags};
use xkv_store::io::device::open::{STORE_FILE, open_read_only};
use xkv_store::io::device::testing::MemoryDevice;
use xkv_store::io::device::{
    self, FileDevice, Inspection, OpenOptions, Target, inspect, is_blank, signature,
};
use xkv_store::io::{BLOCK, Device, DirectIo};
use xkv_store::{ErrorKind, SlotPool};

const MIB: u64 = 1 << 20;

/// A child process that another test is just starting has our files open until its exec: be patient.
fn options(file_bytes: u64) -> OpenOptions {
    OpenOptions { file_bytes, direct: DirectIo::Auto, patience: Duration::from_secs(60) }
}

/// Opening and inspecting fail alike: with this kind, and a text that has all of `words`.
#[track_caller]
fn refused(path: &Path, options: &OpenOptions, kind: ErrorKind, words: &[&str]) {
    let options = &OpenOptions { patience: Duration::ZERO, ..options.clone() };
    let failures = [inspect(path, options).err(), device::open(path, options).err()];
    for (failure, how) in failures.into_iter().zip(["inspect", "open"]) {
        let error = failure.unwrap_or_else(|| panic!("{how} took {}", path.display()));
        assert_eq!(error.kind(), kind, "{how}: {error}");
        let text = error.to_string();
        assert!(text.contains(&path.display().to_string()), "{how}: {text}");
        for word in words {
            assert!(text.contains(word), "{how}: {word:?} is not in {text:?}");
        }
    }
}

#[test]
fn a_missing_folder_is_made_with_a_sparse_file_of_the_wanted_size() {
    let scratch = drives::scratch();
    let folder = scratch.path().join("a/b");
    let device = device::open(&folder, &options(8 * MIB + 100)).unwrap();
    let file = folder.join(STORE_FILE);
    assert_eq!(device.path(), file);
    assert!(device.created() && !device.is_block_device());
    assert_eq!(device.size(), 8 * MIB);
    let metadata = fs::metadata(&file).unwrap();
    assert_eq!(metadata.len(), 8 * MIB);
    assert_eq!(metadata.blocks(), 0, "sparse");
    assert_eq!(metadata.permissions().mode() & 0o777, 0o600);
    assert!(is_blank(&device).unwrap());
    drop(device);

    let again = device::open(&folder, &options(999 * MIB)).unwrap();
    assert!(!again.created());
    assert_eq!(again.size(), 8 * MIB, "an existing file keeps its size");
}

#[test]
fn an_existing_file_is_taken_as_it_is() {
    let scratch = drives::scratch();
    let path = scratch.path().join("some-file");
    let content: Vec<u8> = (0..3 * MIB).map(|i| (i % 251) as u8).collect();
    fs::write(&path, &content).unwrap();
    let before = fs::metadata(&path).unwrap().modified().unwrap();
    let device = device::open(&path, &options(64 * MIB)).unwrap();
    assert!(!device.created());
    assert_eq!(device.size(), 3 * MIB);
    assert!(!is_blank(&device).unwrap());
    device.set_direct(DirectIo::On, false).unwrap();
    assert_eq!(fs::metadata(&path).unwrap().modified().unwrap(), before);
    device.set_direct(DirectIo::On, true).unwrap();
    assert!(fs::metadata(&path).unwrap().modified().unwrap() > before, "the trial write");
    drop(device);
    assert!(fs::read(&path).unwrap() == content);
}

#[test]
fn an_empty_file_counts_as_new() {
    let scratch = drives::scratch();
    let path = scratch.path().join("empty");
    File::create(&path).unwrap();
    assert_eq!(inspect(&path, &options(4 * MIB)).unwrap().size, None);
    let device = device::open(&path, &options(4 * MIB)).unwrap();
    assert!(device.created());
    assert_eq!(fs::metadata(&path).unwrap().len(), 4 * MIB);
}

#[test]
fn what_cannot_be_a_store_is_refused() {
    let scratch = drives::scratch();
    let at = |name: &str| scratch.path().join(name);
    let options = options(4 * MIB);
    refused(Path::new("/dev/null"), &options, ErrorKind::Invalid, &["character device"]);
    let _listener = UnixListener::bind(at("socket")).unwrap();
    refused(&at("socket"), &options, ErrorKind::Invalid, &["a socket"]);
    symlink("nowhere", at("link")).unwrap();
    refused(&at("link"), &options, ErrorKind::Invalid, &["link"]);
    refused(Path::new("/dev/nvme77n1"), &options, ErrorKind::Invalid, &["no such device", "lsblk"]);
    File::create(at("file")).unwrap();
    refused(&at("file/below"), &options, ErrorKind::Io, &["not a folder", "LMC_XKV_STORE"]);
    refused(Path::new(""), &options, ErrorKind::Invalid, &["empty"]);
    fs::create_dir_all(at("folder").join(STORE_FILE)).unwrap();
    refused(&at("folder"), &options, ErrorKind::Invalid, &[STORE_FILE, "a folder"]);
    assert!(!fs::exists("/dev/nvme77n1").unwrap());
}

#[test]
fn a_link_to_a_folder_is_that_folder() {
    let scratch = drives::scratch();
    fs::create_dir(scratch.path().join("real")).unwrap();
    symlink("real", scratch.path().join("link")).unwrap();
    device::open(&scratch.path().join("link"), &options(4 * MIB)).unwrap();
    assert!(fs::exists(scratch.path().join("real").join(STORE_FILE)).unwrap());
}

#[test]
fn a_second_opener_is_refused_until_the_first_is_gone() {
    let scratch = drives::scratch();
    let first = device::open(scratch.path(), &options(4 * MIB)).unwrap();
    refused(scratch.path(), &options(4 * MIB), ErrorKind::InUse, &["in use", "fuser -v"]);
    std::thread::scope(|scope| {
        let second = scope.spawn(|| device::open(scratch.path(), &options(4 * MIB)));
        drop(first);
        second.join().unwrap().unwrap();
    });
}

/// The names of everything in a folder, with sizes and times.
fn snapshot(folder: &Path) -> Vec<(String, u64, std::time::SystemTime)> {
    let mut all: Vec<_> = fs::read_dir(folder)
        .unwrap()
        .map(|entry| {
            let entry = entry.unwrap();
            let metadata = entry.metadata().unwrap();
            let name = entry.file_name().into_string().unwrap();
            (name, metadata.len(), metadata.modified().unwrap())
        })
        .collect();
    all.sort();
    all
}

#[test]
fn inspecting_changes_nothing() {
    let scratch = drives::scratch();
    let folder = scratch.path().join("x/y");
    let found = inspect(&folder, &options(4 * MIB)).unwrap();
    assert_eq!((&found.target, found.size), (&Target::Folder(folder.clone()), None));
    assert!(found.free.unwrap() >= 4 * MIB);
    assert!(open_read_only(&folder).unwrap().is_none());
    assert_eq!(snapshot(scratch.path()), []);

    drop(device::open(&folder, &options(4 * MIB)).unwrap());
    let before = snapshot(&folder);
    for path in [folder.clone(), folder.join(STORE_FILE)] {
        assert_eq!(inspect(&path, &options(MIB)).unwrap().size, Some(4 * MIB));
        let device = open_read_only(&path).unwrap().unwrap();
        assert_eq!(device.size(), 4 * MIB);
        assert!(is_blank(&device).unwrap());
        assert!(device.write_at(&[1; BLOCK], 0).is_err());
    }
    assert_eq!(snapshot(&folder), before);
    device::open(&folder, &options(4 * MIB)).unwrap();
}

#[test]
fn a_file_that_does_not_fit_is_not_begun() {
    if !drives::possible() {
        return;
    }
    let small = Mount::new(&["-t", "tmpfs", "-o", "size=8m", "tmpfs"]);
    let folder = small.path().join("store");
    let wanted = (9 * MIB).to_string();
    let words = [&*wanted, "bytes are free", "LMC_XKV_STORE_GB", "store_gb"];
    refused(&folder, &options(9 * MIB), ErrorKind::TooSmall, &words);
    assert_eq!(snapshot(small.path()), []);
    fs::create_dir(&folder).unwrap();
    refused(&folder, &options(9 * MIB), ErrorKind::TooSmall, &words);
    assert_eq!(snapshot(&folder), []);
    assert_eq!(device::open(&folder, &options(6 * MIB)).unwrap().size(), 6 * MIB);
}

#[test]
fn reserving_takes_real_space_or_says_what_is_missing() {
    let scratch = drives::scratch();
    let device = device::open(scratch.path(), &options(8 * MIB)).unwrap();
    device.reserve(MIB, 4 * MIB).unwrap();
    let metadata = fs::metadata(device.path()).unwrap();
    assert!(metadata.blocks() * 512 >= 4 * MIB);
    assert_eq!(metadata.len(), 8 * MIB);
    assert!(is_blank(&device).unwrap());

    if !drives::possible() {
        return;
    }
    let small = Mount::new(&["-t", "tmpfs", "-o", "size=8m", "tmpfs"]);
    let device = device::open(small.path(), &options(8 * MIB)).unwrap();
    fs::write(small.path().join("other"), vec![1; 3 * MIB as usize]).unwrap();
    let error = device.reserve(0, 8 * MIB).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::TooSmall);
    let text = error.to_string();
    for word in [&(8 * MIB).to_string(), &(5 * MIB).to_string(), "LMC_XKV_STORE_GB"] {
        assert!(text.contains(word), "{word} is not in {text}");
    }
}

#[test]
fn without_rights_the_text_names_the_cure() {
    if !drives::possible() {
        return;
    }
    let scratch = drives::scratch();
    fs::set_permissions(scratch.path(), fs::Permissions::from_mode(0o755)).unwrap();
    let file = scratch.path().join("file");
    fs::write(&file, vec![0; 4 * MIB as usize]).unwrap();
    fs::set_permissions(&file, fs::Permissions::from_mode(0o644)).unwrap();
    let drive = LoopDrive::new(4 * MIB, 512);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            // SAFETY: changes the rights of this thread to files, nothing else; the thread ends with this closure.
            unsafe { libc::setfsuid(65_534) };
            let words = ["Permission denied", "LMC_XKV_STORE"];
            refused(&file, &options(4 * MIB), ErrorKind::Io, &words);
            refused(drive.node(), &options(4 * MIB), ErrorKind::Io, &words);
            let folder = scratch.path().join("new/deep");
            let opened = device::open(&folder, &options(4 * MIB)).unwrap_err();
            let inspected = inspect(&folder, &options(4 * MIB)).unwrap_err();
            for error in [opened, inspected] {
                assert_eq!(error.errno(), Some(libc::EACCES));
                assert!(error.to_string().contains("LMC_XKV_STORE"), "{error}");
            }
        });
    });
    assert_eq!(snapshot(scratch.path()).len(), 1);
}

#[test]
fn a_read_only_filesystem_is_named() {
    if !drives::possible() {
        return;
    }
    let below = drives::scratch();
    fs::write(below.path().join("file"), vec![0; 4 * MIB as usize]).unwrap();
    let mount = Mount::new(&["--bind", "-o", "ro", below.path().to_str().unwrap()]);
    let file = mount.path().join("file");
    let words = ["read-only", "LMC_XKV_STORE"];
    refused(&file, &options(4 * MIB), ErrorKind::Io, &words);
    let folder = mount.path().join("new");
    for error in [
        device::open(&folder, &options(4 * MIB)).unwrap_err(),
        inspect(&folder, &options(4 * MIB)).unwrap_err(),
    ] {
        assert_eq!(error.errno(), Some(libc::EROFS), "{error}");
    }
}

#[test]
fn direct_io_falls_back_where_the_filesystem_refuses_it() {
    if !drives::possible() {
        return;
    }
    // ramfs knows no direct I/O, and no free space either.
    let mount = Mount::new(&["-t", "ramfs", "ramfs"]);
    let path = mount.path().join("file");
    File::create(&path).unwrap().set_len(4 * MIB).unwrap();
    let device = device::open(&path, &options(4 * MIB)).unwrap();
    assert!(!device.set_direct(DirectIo::Auto, true).unwrap());
    assert!(!device.is_direct());
    let block = [7; BLOCK];
    device.write_at(&block, 0).unwrap();
    let mut read = [0; BLOCK];
    device.read_at(&mut read, 0).unwrap();
    assert_eq!(read, block);
    let error = device.set_direct(DirectIo::On, true).unwrap_err();
    assert_eq!(error.errno(), Some(libc::EINVAL));
    assert!(error.to_string().contains(path.to_str().unwrap()), "{error}");
}

/// A file that can be read but refuses writes, whatever its open mode says: only the trial write can tell.
#[test]
fn direct_io_falls_back_where_only_writes_are_refused() {
    let memory = rustix::fs::memfd_create("sealed", MemfdFlags::ALLOW_SEALING).unwrap();
    rustix::fs::ftruncate(&memory, 4 * MIB).unwrap();
    rustix::fs::fcntl_add_seals(&memory, SealFlags::WRITE).unwrap();
    let path = format!("/proc/self/fd/{}", memory.as_raw_fd());
    let device = device::open(Path::new(&path), &options(4 * MIB)).unwrap();
    let error = device.set_direct(DirectIo::On, true).unwrap_err();
    assert!(error.to_string().contains(&path), "{error}");
    assert!(!bypasses_the_page_cache(&device) && !device.is_direct());
    assert!(!device.set_direct(DirectIo::Auto, true).unwrap());
    assert!(!bypasses_the_page_cache(&device) && !device.is_direct());
}

/// What the kernel itself says about the descriptor.
fn bypasses_the_page_cache(device: &FileDevice) -> bool {
    let path = format!("/proc/self/fdinfo/{}", device.fd().unwrap());
    let info = fs::read_to_string(path).unwrap();
    let flags = info.lines().find_map(|line| line.strip_prefix("flags:")).unwrap();
    i32::from_str_radix(flags.trim(), 8).unwrap() & libc::O_DIRECT != 0
}

#[test]
fn direct_io_can_be_turned_off_again() {
    let scratch = drives::scratch();
    let device = device::open(scratch.path(), &options(4 * MIB)).unwrap();
    assert!(device.set_direct(DirectIo::On, true).unwrap());
    assert!(bypasses_the_page_cache(&device) && device.is_direct());
    assert!(!device.set_direct(DirectIo::Off, true).unwrap());
    assert!(!bypasses_the_page_cache(&device) && !device.is_direct());
}

#[test]
fn a_drive_without_room_for_headers_is_too_small() {
    let scratch = drives::scratch();
    let path = scratch.path().join("tiny");
    fs::write(&path, vec![0; 8192]).unwrap();
    let error = device::open(&path, &options(MIB)).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::TooSmall);
}

/// All bytes of the file below a loop device.
fn bytes(drive: &LoopDrive) -> Vec<u8> {
    let mut all = Vec::new();
    let mut file = drive.file();
    file.seek(SeekFrom::Start(0)).unwrap();
    file.read_to_end(&mut all).unwrap();
    all
}

#[test]
fn a_block_device_is_taken_whole_and_alone() {
    if !drives::possible() {
        return;
    }
    for sector in [512, 4096] {
        let drive = LoopDrive::new(16 * MIB, sector);
        let Inspection { target, size, free } = inspect(drive.node(), &options(MIB)).unwrap();
        assert_eq!(target, Target::BlockDevice(drive.node().to_owned()));
        assert_eq!((size, free), (Some(16 * MIB), None));
        let device = device::open(drive.node(), &options(MIB)).unwrap();
        assert!(device.is_block_device() && device.is_direct() && !device.created());
        assert_eq!(device.size(), 16 * MIB);
        assert!(is_blank(&device).unwrap());
        device.reserve(0, MIB).unwrap();
        refused(drive.node(), &options(MIB), ErrorKind::InUse, &["in use", "lsblk", "fuser -v"]);
        let looking = open_read_only(drive.node()).unwrap().unwrap();
        assert_eq!(looking.size(), 16 * MIB);
        drop(device);
        device::open(drive.node(), &options(MIB)).unwrap();
    }
}

#[test]
fn a_read_only_block_device_is_refused() {
    if !drives::possible() {
        return;
    }
    let drive = LoopDrive::read_only(4 * MIB);
    refused(drive.node(), &options(MIB), ErrorKind::Io, &["read-only", "LMC_XKV_STORE"]);
    assert!(is_blank(&open_read_only(drive.node()).unwrap().unwrap()).unwrap());
}

#[test]
fn foreign_drives_are_recognised_and_not_changed() {
    if !drives::possible() {
        return;
    }
    let formats: [(&[&str], &str); 2] =
        [(&["mkfs.ext4", "-q"], "an ext2/3/4 filesystem"), (&["mkswap"], "swap space")];
    for (command, name) in formats {
        let drive = LoopDrive::new(16 * MIB, 512);
        let arguments = [&command[1..], &[drive.node().to_str().unwrap()]].concat();
        drives::run(command[0], &arguments);
        drives::run("blockdev", &["--flushbufs", drive.node().to_str().unwrap()]);
        let before = bytes(&drive);
        inspect(drive.node(), &options(MIB)).unwrap();
        let device = device::open(drive.node(), &options(MIB)).unwrap();
        assert!(!is_blank(&device).unwrap());
        assert_eq!(signature(&device), Some(name));
        drop(device);
        assert!(bytes(&drive) == before, "{name} was changed");
    }
}

#[test]
fn a_mounted_drive_is_refused() {
    if !drives::possible() {
        return;
    }
    let drive = LoopDrive::new(16 * MIB, 512);
    let node = drive.node().to_str().unwrap();
    drives::run("mkfs.ext4", &["-q", node]);
    let _mount = Mount::new(&[node]);
    refused(drive.node(), &options(MIB), ErrorKind::InUse, &["mounted", "lsblk", "fuser -v"]);
    assert!(open_read_only(drive.node()).unwrap().is_some());
}

#[test]
fn blank_means_zeros_at_both_ends() {
    let drive = || MemoryDevice::new(16 * MIB);
    assert!(is_blank(&*drive()).unwrap());
    for offset in [0, MIB - 1, 15 * MIB, 16 * MIB - 1] {
        let device = drive();
        device.flip(offset, 1);
        assert!(!is_blank(&*device).unwrap(), "{offset}");
    }
    let device = drive();
    device.flip(8 * MIB, 1);
    assert!(is_blank(&*device).unwrap());
    assert!(is_blank(&*MemoryDevice::new(BLOCK as u64)).unwrap());
}

#[test]
fn signatures_are_named() {
    let known: [(u64, &[u8], &str); 12] = [
        (0, b"XFSB", "an XFS filesystem"),
        (65_600, b"_BHRfS_M", "a btrfs filesystem"),
        (512, b"LABELONE", "an LVM2 physical volume"),
        (0, b"LUKS\xba\xbe", "a LUKS volume"),
        (4096, b"\xfc\x4e\x2b\xa9", "a Linux RAID member"),
        (16 * MIB - 8192, b"\xfc\x4e\x2b\xa9", "a Linux RAID member"),
        (16 * MIB - 65_536, b"\xfc\x4e\x2b\xa9", "a Linux RAID member"),
        (512, b"EFI PART", "a GPT partition table"),
        (16 * MIB - 512, b"EFI PART", "a GPT partition table (the copy at the end)"),
        (510, b"\x55\xaa", "an MBR partition table"),
        (131_072 + 2048, b"\x0c\xb1\xba\0\0\0\0\0", "a ZFS member"),
        (131_072, b"\0\0\0\0\0\xba\xb1\x0c", "a ZFS member"),
    ];
    assert_eq!(signature(&*MemoryDevice::new(16 * MIB)), None);
    let pool = SlotPool::new(1, BLOCK).unwrap();
    for (offset, magic, name) in known {
        let device = MemoryDevice::new(16 * MIB);
        let start = offset - offset % BLOCK as u64;
        let mut block = pool.try_take().unwrap();
        block.fill(0);
        let within = (offset - start) as usize;
        block[within..within + magic.len()].copy_from_slice(magic);
        device.write_at(&block, start).unwrap();
        assert_eq!(signature(&*device), Some(name));
        assert!(!is_blank(&*device).unwrap(), "{name}");
    }
}

/// The file is replaced while somebody waits for its lock: the lock of the old file is worth nothing.
#[test]
fn a_replaced_file_is_noticed() {
    let scratch = drives::scratch();
    let path = fs::canonicalize(scratch.path()).unwrap().join("file");
    File::create_new(&path).unwrap().set_len(4 * MIB).unwrap();
    let holder = device::open(&path, &options(4 * MIB)).unwrap();
    std::thread::scope(|scope| {
        let waiting = scope.spawn(|| device::open(&path, &options(4 * MIB)));
        let opened = || {
            let links = fs::read_dir("/proc/self/fd").unwrap();
            let targets = links.filter_map(|link| fs::read_link(link.unwrap().path()).ok());
            targets.filter(|target| *target == path).count()
        };
        let deadline = Instant::now() + Duration::from_secs(60);
        while opened() < 2 {
            assert!(Instant::now() < deadline, "nobody waits for the lock");
            std::thread::yield_now();
        }
        fs::write(scratch.path().join("new"), vec![5; 2 * MIB as usize]).unwrap();
        fs::rename(scratch.path().join("new"), &path).unwrap();
        drop(holder);
        assert_eq!(waiting.join().unwrap().unwrap().size(), 2 * MIB);
    });
}
