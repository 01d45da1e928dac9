//! Log lines on stderr, set up once per process.

use std::fmt;
use std::io::{self, Write};
use std::sync::Once;
use std::sync::atomic::{AtomicBool, Ordering};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use serde_json::{Map, Value};
use tracing::field::{Field, Visit};
use tracing::{Event, Level, Subscriber};
use tracing_subscriber::fmt::format::{FormatEvent, FormatFields, Writer};
use tracing_subscriber::fmt::time::{FormatTime, SystemTime};
use tracing_subscriber::fmt::{FmtContext, SubscriberBuilder};
use tracing_subscriber::registry::LookupSpan;

/// A pipe that poll calls writable takes so many bytes without blocking (PIPE_BUF).
const PIECE: usize = 4096;
/// How long a line waits for somebody to read the log.
const PATIENCE: Timespec = Timespec { tv_sec: 0, tv_nsec: 500_000_000 };

/// Standard error for threads that must not stand still because nobody reads the log: a line that is not taken within
/// the patience is lost, and the next ones get no patience until one is taken.
struct Stderr;

impl Write for Stderr {
    fn write(&mut self, line: &[u8]) -> io::Result<usize> {
        static READ: AtomicBool = AtomicBool::new(true);
        let stderr = rustix::stdio::stderr();
        let patience = if READ.load(Ordering::Relaxed) { PATIENCE } else { Timespec::default() };
        let writable = poll(&mut [PollFd::new(&stderr, PollFlags::OUT)], Some(&patience))? > 0;
        READ.store(writable, Ordering::Relaxed);
        if !writable {
            return Err(io::ErrorKind::TimedOut.into());
        }
        Ok(rustix::io::write(stderr, &line[..line.len().min(PIECE)])?)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// How a line looks.
#[derive(Clone, Copy)]
pub enum Format {
    /// `<prefix> <time> <level> <text> <fields>`.
    Console(&'static str),
    /// One JSON object with `timestamp`, `level`, `event`, `logger` and the fields.
    Json(&'static str),
}

impl<S, N> FormatEvent<S, N> for Format
where
    S: Subscriber + for<'a> LookupSpan<'a>,
    N: for<'a> FormatFields<'a> + 'static,
{
    fn format_event(
        &self,
        ctx: &FmtContext<'_, S, N>,
        mut writer: Writer<'_>,
        event: &Event<'_>,
    ) -> fmt::Result {
        match self {
            Self::Console(prefix) => {
                write!(writer, "{prefix} ")?;
                SystemTime.format_time(&mut writer)?;
                write!(writer, " {} ", event.metadata().level())?;
                ctx.format_fields(writer.by_ref(), event)?;
                writeln!(writer)
            }
            Self::Json(logger) => {
                let mut time = String::new();
                SystemTime.format_time(&mut Writer::new(&mut time))?;
                let level = match *event.metadata().level() {
                    Level::WARN => "warning".to_owned(),
                    level => level.as_str().to_lowercase(),
                };
                let mut fields = Fields::default();
                event.record(&mut fields);
                let mut line = Map::new();
                line.insert("timestamp".into(), time.into());
                line.insert("level".into(), level.into());
                line.insert("event".into(), fields.message.into());
                line.insert("logger".into(), (*logger).into());
                line.extend(fields.others);
                writeln!(writer, "{}", Value::Object(line))
            }
        }
    }
}

#[derive(Default)]
struct Fields {
    message: String,
    others: Map<String, Value>,
}

impl Fields {
    fn put(&mut self, field: &Field, value: Value) {
        match value {
            Value::String(text) if field.name() == "message" => self.message = text,
            value => _ = self.others.insert(field.name().into(), value),
        }
    }
}

impl Visit for Fields {
    fn record_debug(&mut self, field: &Field, value: &dyn fmt::Debug) {
        self.put(field, format!("{value:?}").into());
    }

    fn record_str(&mut self, field: &Field, value: &str) {
        self.put(field, value.into());
    }

    fn record_u64(&mut self, field: &Field, value: u64) {
        self.put(field, value.into());
    }

    fn record_i64(&mut self, field: &Field, value: i64) {
        self.put(field, value.into());
    }

    fn record_f64(&mut self, field: &Field, value: f64) {
        self.put(field, value.into());
    }

    fn record_bool(&mut self, field: &Field, value: bool) {
        self.put(field, value.into());
    }
}

/// Installs the connector's, at the level that `XKV_LOG` names (error, warn, info, debug, trace; default info).
pub fn install() {
    let level = std::env::var("XKV_LOG").ok().and_then(|name| name.parse().ok()).unwrap_or(Level::INFO);
    install_as(Format::Console("[xkv-lmcache]"), level);
}

/// Installs lines of a form from a level on, unless there is a log already.
pub fn install_as(format: Format, level: Level) {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        // Another extension of this process may have installed its own: then that one gets the lines.
        let _ = tracing::subscriber::set_global_default(
            SubscriberBuilder::default()
                .with_max_level(level)
                .with_writer(|| Stderr)
                // A line that is lost is no reason to write another, let alone to panic.
                .log_internal_errors(false)
                .event_format(format)
                .finish(),
        );
    });
}
