//! Handing the session's memory over: a Unix socket of a random name in the shared folder, used once.

use std::io::{self, IoSlice, IoSliceMut, Read};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, SocketAddrUnix, SocketFlags, SocketType,
};

use crate::entry::MOST_DRIVES;

/// How the names of these sockets begin and end.
pub const PREFIX: &str = "xkv-";
const SUFFIX: &str = ".sock";
/// Longest path of a Unix socket, bytes.
const MAX_PATH: usize = 107;
/// Descriptors that are handed over at most: the memory's and a drive's each.
const MOST_FDS: usize = 1 + MOST_DRIVES;
/// How often the gateway looks whether the client is still there.
const TICK: Duration = Duration::from_millis(100);
/// How long whoever connects may take to show the ticket.
const SHOWING: Duration = Duration::from_secs(1);

/// Who may connect to the socket.
#[derive(Clone, Copy, Debug)]
pub struct Access {
    /// Permission bits.
    pub mode: u32,
    /// Owning group; none leaves the process's own.
    pub group: Option<u32>,
}

/// The gateway's end; the name is gone when this is dropped.
pub struct Handover {
    listener: UnixListener,
    path: PathBuf,
}

impl Handover {
    /// Listens on a new socket `xkv-<store>-<random>.sock` in `folder`.
    ///
    /// # Errors
    /// The folder is missing or not writable; the text names it.
    pub fn listen(folder: &Path, store: &str, random: u64, access: Access) -> io::Result<Self> {
        let path = folder.join(format!("{PREFIX}{store}-{random:016x}{SUFFIX}"));
        check_length(&path)?;
        let named = |error: io::Error| io::Error::new(error.kind(), format!("{}: {error}", path.display()));
        let listener = UnixListener::bind(&path).map_err(named)?;
        let handover = Self { listener, path: path.clone() };
        if let Some(group) = access.group {
            std::os::unix::fs::chown(&path, None, Some(group)).map_err(|error| {
                let text =
                    format!("{}: cannot be given to group {group} (socket_group): {error}", path.display());
                io::Error::new(error.kind(), text)
            })?;
        }
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(access.mode)).map_err(named)?;
        handover.listener.set_nonblocking(true)?;
        Ok(handover)
    }

    /// Name of the socket in its folder.
    pub fn name(&self) -> String {
        self.path.file_name().expect("made with a name").to_string_lossy().into_owned()
    }

    /// The whole path.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Gives what `fds` returns to the first that connects and shows the ticket. `gone` is asked now and then. Returns the
    /// connection, at whose end the other side sees that this one is no more.
    ///
    /// # Errors
    /// `TimedOut` when nobody does within `patience`, or the client is gone.
    pub fn give(
        &self,
        fds: impl FnOnce() -> Vec<OwnedFd>,
        ticket: u64,
        patience: Duration,
        gone: impl Fn() -> bool,
    ) -> io::Result<UnixStream> {
        let deadline = Instant::now() + patience;
        loop {
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() || gone() {
                return Err(io::Error::new(
                    io::ErrorKind::TimedOut,
                    "the client did not fetch the session's memory",
                ));
            }
            wait_readable(&self.listener, left.min(TICK))?;
            let mut stream = match self.listener.accept() {
                Ok((stream, _)) => stream,
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => continue,
                Err(error) => return Err(error),
            };
            if read_ticket(&mut stream, left.min(SHOWING)).is_ok_and(|shown| shown == ticket) {
                send_fds(&stream, &fds())?;
                return Ok(stream);
            }
        }
    }
}

impl Drop for Handover {
    fn drop(&mut self) {
        _ = std::fs::remove_file(&self.path);
    }
}

/// Removes sockets that an earlier gateway of this store left behind.
pub fn clean(folder: &Path, store: &str) {
    let ours = format!("{PREFIX}{store}-");
    for entry in std::fs::read_dir(folder).into_iter().flatten().flatten() {
        let name = entry.file_name();
        let name = name.to_string_lossy();
        if name.starts_with(&ours) && name.ends_with(SUFFIX) {
            _ = std::fs::remove_file(entry.path());
        }
    }
}

/// What a client fetches.
pub struct Fetched {
    /// The session's.
    pub memory: OwnedFd,
    /// What came with it. A system may keep some of that back: a security module, a limit on descriptors.
    pub drives: Vec<OwnedFd>,
    /// Ends with the gateway, where that keeps it.
    pub stream: UnixStream,
}

/// The client's end: fetches the memory that `socket` in `folder` hands out, and what comes with it.
///
/// # Errors
/// The socket cannot be reached (the text says what that means), or hands out nothing.
pub fn fetch(folder: &Path, socket: &str, ticket: u64, patience: Duration) -> io::Result<Fetched> {
    if socket.contains('/') || !socket.starts_with(PREFIX) {
        let text = format!("the gateway named the socket {socket:?}, which is not one of ours");
        return Err(io::Error::new(io::ErrorKind::InvalidData, text));
    }
    let path = folder.join(socket);
    check_length(&path)?;
    let mut stream = connect(&path).map_err(|error| {
        let text = format!(
            "{}: {error}; the gateway is on another host, or the shared folder (shm_dir) is not the same folder on both \
             sides: share the host's /dev/shm (ipc: host) or mount one folder into both",
            path.display()
        );
        io::Error::new(error.kind(), text)
    })?;
    stream.set_read_timeout(Some(patience))?;
    stream.set_write_timeout(Some(patience))?;
    io::Write::write_all(&mut stream, &ticket.to_le_bytes())?;
    let mut fds = receive_fds(&stream)?.into_iter();
    let nothing = || io::Error::new(io::ErrorKind::UnexpectedEof, "the gateway handed out no memory");
    Ok(Fetched { memory: fds.next().ok_or_else(nothing)?, drives: fds.collect(), stream })
}

fn check_length(path: &Path) -> io::Result<()> {
    let over = path.as_os_str().len().saturating_sub(MAX_PATH);
    if over == 0 {
        return Ok(());
    }
    let text = format!(
        "{}: a socket's path has at most {MAX_PATH} bytes; choose a shared folder (shm_dir) whose path is {over} bytes \
         shorter",
        path.display()
    );
    Err(io::Error::new(io::ErrorKind::InvalidInput, text))
}

/// Connects without waiting: a queue of connections that nobody accepts would block for ever.
fn connect(path: &Path) -> io::Result<UnixStream> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = rustix::net::socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
    rustix::net::connect(&socket, &SocketAddrUnix::new(path)?)?;
    let stream = UnixStream::from(socket);
    stream.set_nonblocking(false)?;
    Ok(stream)
}

/// The eight bytes that the other side shows, all of them within `patience`.
fn read_ticket(stream: &mut UnixStream, patience: Duration) -> io::Result<u64> {
    let deadline = Instant::now() + patience;
    stream.set_nonblocking(false)?;
    let (mut shown, mut have) = ([0; 8], 0);
    while have < shown.len() {
        let left = deadline.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Err(io::ErrorKind::TimedOut.into());
        }
        stream.set_read_timeout(Some(left))?;
        match stream.read(&mut shown[have..])? {
            0 => return Err(io::ErrorKind::UnexpectedEof.into()),
            len => have += len,
        }
    }
    Ok(u64::from_le_bytes(shown))
}

fn wait_readable(fd: impl AsFd, patience: Duration) -> io::Result<()> {
    let timeout = Timespec { tv_sec: patience.as_secs() as i64, tv_nsec: i64::from(patience.subsec_nanos()) };
    match poll(&mut [PollFd::new(&fd, PollFlags::IN)], Some(&timeout)) {
        Ok(_) | Err(rustix::io::Errno::INTR) => Ok(()),
        Err(error) => Err(error.into()),
    }
}

fn send_fds(stream: &UnixStream, fds: &[OwnedFd]) -> io::Result<()> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MOST_FDS))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    let fds: Vec<_> = fds.iter().map(AsFd::as_fd).collect();
    if !control.push(SendAncillaryMessage::ScmRights(&fds)) {
        return Err(io::Error::other(format!("no room for {} descriptors", fds.len())));
    }
    rustix::net::sendmsg(stream, &[IoSlice::new(&[1])], &mut control, SendFlags::NOSIGNAL)?;
    Ok(())
}

fn receive_fds(stream: &UnixStream) -> io::Result<Vec<OwnedFd>> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MOST_FDS))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let mut byte = [0];
    rustix::net::recvmsg(stream, &mut [IoSliceMut::new(&mut byte)], &mut control, RecvFlags::CMSG_CLOEXEC)?;
    let fds = control.drain().filter_map(|message| match message {
        RecvAncillaryMessage::ScmRights(fds) => Some(fds),
        _ => None,
    });
    Ok(fds.flatten().collect())
}
