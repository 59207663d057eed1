/* What the page's data says: rows as typed arrays that can be searched, and words for every part of them. */

const number = (value) => String(Number(value.toPrecision(6)));
/* Times are in the unit of the costs, which is unknown unless the page says that they are seconds. */
const clock = { seconds: false };

function timeText(value) {
  if (!clock.seconds || Math.abs(value) < 5e-10) return number(Math.abs(value) < 1e-12 ? 0 : value);
  const [unit, size] = [["s", 1], ["ms", 1e-3], ["µs", 1e-6]].find(([, one]) => Math.abs(value) >= one) ?? ["ns", 1e-9];
  return `${Number((value / size).toPrecision(4))} ${unit}`;
}

const percent = (share) => (share < 0.00005 ? "0" : Number((100 * share).toPrecision(3))) + "%";

function bytes(value) {
  for (const unit of ["B", "KiB", "MiB", "GiB"]) {
    if (Math.abs(value) < 1024) return `${Number(value.toPrecision(3))} ${unit}`;
    value /= 1024;
  }
  return `${Number(value.toPrecision(4))} TiB`;
}

/* The first index whose value is greater than `wanted`; `values` are sorted. */
function after(values, wanted) {
  let low = 0, high = values.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (values[middle] > wanted) high = middle; else low = middle + 1;
  }
  return low;
}

const KINDS = { u1: Uint8Array, i2: Int16Array, i4: Int32Array, f8: Float64Array };

/* The numbers of a packed column: its type, and the base64 of its bytes. */
function unpack(text) {
  const coded = text.slice(3), bytes = Uint8Array.fromBase64?.(coded) ?? Uint8Array.from(atob(coded), (one) => one.charCodeAt(0));
  return new KINDS[text.slice(0, 2)](bytes.buffer);
}

/* Times from starts and lengths in ticks, `perSecond` of them per second, as [starts, ends]. */
function spans(starts, lengths, perSecond = 1) {
  const start = new Float64Array(starts.length), end = new Float64Array(starts.length);
  for (let i = 0; i < start.length; i++) {
    start[i] = starts[i] / perSecond;
    end[i] = (starts[i] + lengths[i]) / perSecond;
  }
  return [start, end];
}

/* A step curve whose times are ticks. */
const curve = ({ time, value }, perSecond) => (
  { time: Float64Array.from(unpack(time), (ticks) => ticks / perSecond), value: unpack(value) });

const PARTS = ["stage", "op", "microbatch", "local"];
/* The colours of an op: of even and odd microbatches, and paler ones for every second slice of them. */
const SHADES = ["even", "odd", "pale_even", "pale_odd"];

class Row {
  constructor(raw, rank, perSecond) {
    this.rank = rank;
    this.raw = raw;
    [this.start, this.end] = spans(unpack(raw.start), unpack(raw.ticks), perSecond);
    this.length = this.start.length;
    [this.stage, this.op, this.microbatch, this.local] = PARTS.map((name) => unpack(raw[name]));
    this.later = Object.fromEntries(["index", ...PARTS].map((name) => [name, unpack(raw.second[name])]));
    this.laterAt = new Int32Array(this.length); // its index plus one, so that 0 means none
    this.later.index.forEach((index, at) => { this.laterAt[index] = at + 1; });
    this.critical = new Uint8Array(this.length);
    this.why = null;
    this.idleStart = this.idleEnd = new Float64Array(0);
    this.causes = [];
  }

  /* Load the explanations of the row. */
  learn(why, perSecond) {
    this.why = why;
    [this.idleStart, this.idleEnd] = spans(why.idle.start, why.idle.seconds);
    this.causes = unpack(why.idle.cause);
    [this.needRank, this.needIndex] = [unpack(why.need_rank), unpack(why.need_index)];
    this.memory = curve(why.memory, perSecond);
    this.ordered = null;
  }

  /* The other half of an overlapped pair, or null. */
  second(index) {
    const at = this.laterAt[index] - 1, { stage, op, microbatch, local } = this.later;
    return at < 0 ? null : { stage: stage[at], op: op[at], microbatch: microbatch[at], local: local[at] };
  }

  /* Where the box's latest input from another rank ran, as {rank, index}, or null. */
  input(index) {
    const rank = this.needRank ? this.needRank[index] : -1;
    return rank < 0 ? null : { rank, index: this.needIndex[index] };
  }

  /* The box at a time, or -1; a box without length is found within `slack`. */
  boxAt(time, slack = 0) {
    const next = after(this.end, time);
    for (const index of [next - 1, next]) {
      const instant = index >= 0 && index < this.length && this.end[index] === this.start[index];
      if (instant && Math.abs(this.start[index] - time) <= slack) return index;
    }
    return next < this.length && this.start[next] <= time ? next : -1;
  }

  idleAt(time) {
    const next = after(this.idleEnd, time);
    return next < this.idleEnd.length && this.idleStart[next] <= time ? next : -1;
  }

  /* Boxes and bubbles in order of time, for the keyboard: i is box i, -1 - i is bubble i. */
  get items() {
    if (!this.ordered) {
      const key = (item) => (item >= 0 ? this.start[item] : this.idleStart[-1 - item]);
      const items = [...this.start.keys(), ...[...this.idleStart.keys()].map((i) => -1 - i)];
      this.ordered = items.sort((a, b) => key(a) - key(b) || (a >= 0 ? a : Infinity) - (b >= 0 ? b : Infinity));
    }
    return this.ordered;
  }

  from(item) { return item >= 0 ? this.start[item] : this.idleStart[-1 - item]; }

  to(item) { return item >= 0 ? this.end[item] : this.idleEnd[-1 - item]; }
}

class Model {
  constructor(raw, { ops, causes, hatches, sentences }) {
    Object.assign(this, { raw, ops, causes, hatches, sentences, name: raw.name, makespan: raw.makespan, slices: raw.slices ?? 1 });
    this.rows = raw.rows.map((row, rank) => new Row(row, rank, raw.ticks_per_second));
    Object.assign(this, { explained: false, path: [], queues: [] });
    this.bytesKnown = raw.peak_bytes !== null;
    this.peak = this.bytesKnown ? raw.peak_bytes : raw.peak_activations;
    this.shortest = this.typicalShortest();
    if (raw.why) this.learn(raw.why);
  }

  /* Load the explanations of the picture, which may arrive later. */
  learn({ rows, critical: { rank, index }, queues }) {
    const perSecond = this.raw.ticks_per_second;
    this.rows.forEach((row, at) => row.learn(rows[at], perSecond));
    const at = unpack(index);
    this.path = Array.from(unpack(rank), (one, i) => [one, at[i]]);
    for (const [one, box] of this.path) this.rows[one].critical[box] = 1;
    this.queues = queues.map((queue) => ({ ...queue, ...curve(queue, perSecond) }));
    this.explained = true;
  }

  /* A microbatch's boxes in order of time, as {rank, index}. */
  way(microbatch) {
    if (!this.ways) {
      this.ways = new Map();
      for (const row of this.rows) {
        const add = (one, index) => {
          if (one < 0) return;
          if (!this.ways.has(one)) this.ways.set(one, []);
          this.ways.get(one).push({ rank: row.rank, index });
        };
        row.microbatch.forEach(add);
        row.later.microbatch.forEach((one, at) => add(one, row.later.index[at]));
      }
      for (const way of this.ways.values()) {
        way.sort((a, b) => this.rows[a.rank].start[a.index] - this.rows[b.rank].start[b.index] || a.rank - b.rank);
      }
    }
    return this.ways.get(microbatch) ?? [];
  }

  /* The length that nine of ten boxes reach: it determines how long labels are. */
  typicalShortest() {
    const lengths = [];
    for (const row of this.rows) {
      const step = Math.max(1, Math.floor(row.length / 200));
      for (let i = 0; i < row.length; i += step) if (row.end[i] > row.start[i]) lengths.push(row.end[i] - row.start[i]);
    }
    return lengths.length ? lengths.sort((a, b) => a - b)[Math.floor(lengths.length / 10)] : 0;
  }

  parts(row, index) {
    const first = { stage: row.stage[index], op: row.op[index], microbatch: row.microbatch[index] };
    const second = row.second(index);
    return second ? [first, second] : [first];
  }

  /* A microbatch's number, or that of a slice, as it is written. */
  unit(number) {
    const { slices } = this;
    return slices > 1 ? `${Math.floor(number / slices)}.${number % slices}` : String(number);
  }

  /* Which of `SHADES` a microbatch or a slice has. */
  shade(number) {
    const { slices } = this;
    return number > 0 ? (Math.floor(number / slices) & 1) + 2 * (number % slices & 1) : 0;
  }

  code(row, index) {
    const texts = this.parts(row, index).map(
      ({ stage, op, microbatch }) => stage + this.ops[op].text + (microbatch < 0 ? "" : this.unit(microbatch)));
    return texts.length > 1 ? `(${texts.join(";")})` : texts[0];
  }

  sentence({ stage, op, microbatch }) {
    return this.ops[op].sentence.replace("{stage}", stage).replace("{microbatch}", this.unit(microbatch));
  }

  amount(value) {
    return this.bytesKnown ? bytes(value) : `${value} ${value === 1 ? "pair" : "pairs"}`;
  }

  /* What a box or bubble is, as {title, code, facts, why}. */
  explain(rank, item) {
    const said = item >= 0 ? this.explainBox(rank, item) : this.explainIdle(rank, -1 - item), row = this.rows[rank];
    for (const [start, seconds, stage] of row.raw.exchanges) {
      if (start < row.to(item) && start + seconds > row.from(item)) {
        said.facts.push(["meanwhile", `gradient exchange of stage ${stage}`]);
      }
    }
    return said;
  }

  explainBox(rank, index) {
    const row = this.rows[rank];
    const [first, second] = this.parts(row, index).map((part) => this.sentence(part));
    return {
      kind: "box",
      title: second ? `${first}, overlapped with: ${second[0].toLowerCase()}${second.slice(1)}` : first,
      code: this.code(row, index),
      facts: [
        ["rank", String(rank)],
        ["start", timeText(row.start[index])],
        ["duration", timeText(row.end[index] - row.start[index])],
        ["end", timeText(row.end[index])],
        ...(row.critical[index] ? [["critical path", "yes"]] : []),
      ],
      why: this.waited(row, index),
    };
  }

  waited(row, index) {
    if (!this.explained) return "Still computing what it waited for.";
    const slack = 1e-9 * this.makespan, start = row.start[index], freed = index ? row.end[index - 1] : 0, reasons = [];
    for (let i = after(row.idleEnd, freed + slack); i < row.idleEnd.length && row.idleStart[i] < start - slack; i++) {
      reasons.push([timeText(row.idleEnd[i] - row.idleStart[i]), this.idleWords(row, i)]);
    }
    if (reasons.length === 1) return `Waited ${reasons[0].join(": ")}.`;
    if (reasons.length) {
      return `Waited ${timeText(start - freed)}: ${reasons.map(([length, words]) => `${words} (${length})`).join("; then ")}.`;
    }
    const needed = row.input(index);
    if (!needed) return "Needs nothing from another rank.";
    const from = this.rows[needed.rank], spare = start - from.end[needed.index];
    const input = `${this.code(from, needed.index)} of rank ${needed.rank}`;
    return spare > slack
      ? `Did not wait: its input, ${input}, had been ready for ${timeText(spare)}.`
      : `Did not wait: its input, ${input}, was ready just in time.`;
  }

  /* Why the row was idle: its own words, or the standard sentence of its cause. */
  idleWords(row, index) {
    const own = row.why.idle.words[index];
    if (own) return own;
    const before = Math.min(row.length - 1, after(row.start, row.idleEnd[index] - 1e-9 * this.makespan)), needed = row.input(before);
    return this.sentences[this.causes[row.causes[index]]]
      .replaceAll("{before}", this.code(row, before))
      .replaceAll("{needed}", `${this.code(this.rows[needed.rank], needed.index)} of rank ${needed.rank}`);
  }

  explainIdle(rank, index) {
    const row = this.rows[rank], words = this.idleWords(row, index);
    return {
      kind: "bubble",
      title: `Rank ${rank} idle for ${timeText(row.idleEnd[index] - row.idleStart[index])}`,
      code: this.causes[row.causes[index]],
      facts: [["from", timeText(row.idleStart[index])], ["to", timeText(row.idleEnd[index])]],
      why: `${words[0].toUpperCase()}${words.slice(1)}.`,
    };
  }

  explainMemory(rank, time) {
    const row = this.rows[rank], { time: times, value } = row.memory;
    const held = value[Math.max(0, after(times, time) - 1)];
    const peak = this.bytesKnown ? row.raw.peak_bytes : row.raw.peak_activations;
    return {
      kind: "memory", title: `Rank ${rank} holds ${this.amount(held)}`, code: "memory",
      facts: [["at", timeText(time)], ["peak", this.amount(peak)]], why: "",
    };
  }

  explainQueue(edge, time) {
    const { source, target, time: times, value } = this.queues[edge];
    const depth = value[Math.max(0, after(times, time) - 1)];
    return {
      kind: "queue", title: `${depth} ${depth === 1 ? "message waits" : "messages wait"}`, code: `${source} → ${target}`,
      facts: [["at", timeText(time)]], why: `Sent by rank ${source} and not yet used by rank ${target}.`,
    };
  }
}
