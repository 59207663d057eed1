/* What the page's data says: rows as typed arrays that can be searched, and words for every part of them. */

const number = (value) => String(Number(value.toPrecision(6)));
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

function ends(start, seconds) {
  const end = new Float64Array(start.length);
  for (let i = 0; i < end.length; i++) end[i] = start[i] + seconds[i];
  return end;
}

class Row {
  constructor(raw, rank) {
    this.rank = rank;
    this.raw = raw;
    this.length = raw.start.length;
    this.start = Float64Array.from(raw.start);
    this.end = ends(raw.start, raw.seconds);
    this.stage = Int32Array.from(raw.stage);
    this.op = Uint8Array.from(raw.op);
    this.microbatch = Int32Array.from(raw.microbatch);
    this.local = raw.local.length ? Uint8Array.from(raw.local) : new Uint8Array(this.length);
    this.second = new Map(
      raw.second.map(([index, stage, op, microbatch, local]) => [index, { stage, op, microbatch, local }]));
    this.idleStart = Float64Array.from(raw.idle.start);
    this.idleEnd = ends(raw.idle.start, raw.idle.seconds);
    this.critical = new Uint8Array(this.length);
  }

  /* The box at a time, or -1; one of no length is found within `slack`. */
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
  constructor(raw, ops, causes) {
    Object.assign(this, { raw, ops, causes, name: raw.name, makespan: raw.makespan });
    this.rows = raw.rows.map((row, rank) => new Row(row, rank));
    const { rank, index } = raw.critical;
    this.path = rank.map((one, i) => [one, index[i]]);
    for (const [one, at] of this.path) this.rows[one].critical[at] = 1;
    this.bytesKnown = raw.peak_bytes !== null;
    this.peak = this.bytesKnown ? raw.peak_bytes : raw.peak_activations;
    this.shortest = this.typicalShortest();
  }

  /* The length that nine boxes in ten reach: it decides how much a label says. */
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
    const second = row.second.get(index);
    return second ? [first, second] : [first];
  }

  code(row, index) {
    const texts = this.parts(row, index).map(
      ({ stage, op, microbatch }) => stage + this.ops[op].text + (microbatch < 0 ? "" : microbatch));
    return texts.length > 1 ? `(${texts.join(";")})` : texts[0];
  }

  sentence({ stage, op, microbatch }) {
    return this.ops[op].sentence.replace("{stage}", stage).replace("{microbatch}", microbatch);
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
        ["start", number(row.start[index])],
        ["duration", number(row.end[index] - row.start[index])],
        ["end", number(row.end[index])],
        ...(row.critical[index] ? [["critical path", "yes"]] : []),
      ],
      why: this.waited(row, index),
    };
  }

  waited(row, index) {
    const slack = 1e-9 * this.makespan, start = row.start[index], freed = index ? row.end[index - 1] : 0, reasons = [];
    for (let i = after(row.idleEnd, freed + slack); i < row.idleEnd.length && row.idleStart[i] < start - slack; i++) {
      reasons.push([number(row.idleEnd[i] - row.idleStart[i]), row.raw.idle.words[i]]);
    }
    if (reasons.length === 1) return `Waited ${reasons[0].join(": ")}.`;
    if (reasons.length) {
      return `Waited ${number(start - freed)}: ${reasons.map(([length, words]) => `${words} (${length})`).join("; then ")}.`;
    }
    const source = row.raw.need_rank[index];
    if (source < 0) return "Needs nothing of another rank.";
    const from = this.rows[source], at = row.raw.need_index[index];
    const spare = start - from.end[at];
    const input = `${this.code(from, at)} of rank ${source}`;
    return spare > slack
      ? `Did not wait: its input, ${input}, had been ready for ${number(spare)}.`
      : `Did not wait: its input, ${input}, was ready just then.`;
  }

  explainIdle(rank, index) {
    const row = this.rows[rank], words = row.raw.idle.words[index];
    return {
      kind: "bubble",
      title: `Rank ${rank} idle for ${number(row.idleEnd[index] - row.idleStart[index])}`,
      code: this.causes[row.raw.idle.cause[index]],
      facts: [["from", number(row.idleStart[index])], ["to", number(row.idleEnd[index])]],
      why: `${words[0].toUpperCase()}${words.slice(1)}.`,
    };
  }

  explainMemory(rank, time) {
    const row = this.rows[rank], { time: times, value } = row.raw.memory;
    const held = value[Math.max(0, after(times, time) - 1)];
    const peak = this.bytesKnown ? row.raw.peak_bytes : row.raw.peak_activations;
    return {
      kind: "memory", title: `Rank ${rank} holds ${this.amount(held)}`, code: "memory",
      facts: [["at", number(time)], ["peak", this.amount(peak)]], why: "",
    };
  }

  explainQueue(edge, time) {
    const { source, target, time: times, value } = this.raw.queues[edge];
    const depth = value[Math.max(0, after(times, time) - 1)];
    return {
      kind: "queue", title: `${depth} ${depth === 1 ? "message waits" : "messages wait"}`, code: `${source} → ${target}`,
      facts: [["at", number(time)]], why: `Sent by rank ${source} and not yet taken up by rank ${target}.`,
    };
  }
}
