'use strict';
// The data of the page, and which episodes the filters leave; report/page.py writes it.

/** Inflates the JSON in one of the page's script elements; its text is then dropped. */
async function inflate(id) {
  const element = document.getElementById(id);
  const text = atob(element.textContent);
  element.textContent = '';
  const bytes = new Uint8Array(text.length);
  for (let i = 0; i < text.length; i++) bytes[i] = text.charCodeAt(i);
  const stream = new Blob([bytes])
    .stream()
    .pipeThrough(new DecompressionStream('deflate'));
  return new Response(stream).json();
}

const inflated = new Map();

/** Returns a chunk of the data (see report/page.py); each is inflated once. */
function readChunk(id) {
  if (!inflated.has(id)) inflated.set(id, inflate(id));
  return inflated.get(id);
}

let run; // What report/page.py calls `run`.
let groups = []; // {log, id, question, members}; members are numbers of episodes.
let texts = null; // The text of each episode in lower case, once all are inflated.

async function load() {
  run = await readChunk('run');
  groups = run.groups.map(([log, id, question]) => ({log, id, question, members: []}));
  run.episodes.group.forEach((group, i) => groups[group].members.push(i));
  for (const group of groups) {
    const by = i => run.episodes.sample[i];
    group.members.sort((a, b) => by(a) - by(b));
    const rewards = group.members
      .map(i => run.episodes.reward[i])
      .filter(r => r !== null);
    group.mean = rewards.reduce((a, b) => a + b, 0) / rewards.length;
    group.spread = Math.max(...rewards) - Math.min(...rewards);
  }
}

/** Inflates all texts for the search, a chunk at a time, so that the page stays alive. */
async function loadTexts() {
  const found = [];
  for (let i = 0; i < run.episodes.group.length; i += run.sizes.text) {
    for (const episode of await readChunk(`text-${i / run.sizes.text}`)) {
      const messages = episode.messages.map(message => message.content);
      const group = groups[run.episodes.group[found.length]];
      const all = [group.id, episode.answer, episode.error ?? '', ...messages];
      found.push(all.join('\n').toLowerCase());
    }
  }
  texts = found;
}

/** Returns the text of an episode, and the columns of its tokens if it has them. */
async function readEpisode(i) {
  const find = async (kind, place) => {
    const size = run.sizes[kind];
    return (await readChunk(`${kind}-${Math.floor(place / size)}`))[place % size];
  };
  const place = run.episodes.tokens[i];
  const columns = place < 0 ? null : await find('tokens', place);
  return {...(await find('text', i)), columns};
}

const ERRORS = {
  any: i => failures(i) > 0 || run.episodes.status[i] === 'error',
  none: i => failures(i) === 0 && run.episodes.status[i] !== 'error',
  'tool failed': i => run.episodes.tool_errors[i] > 0,
  'call unreadable': i => run.episodes.format_errors[i] > 0,
  'environment raised': i => run.episodes.status[i] === 'error',
};

const failures = i => run.episodes.tool_errors[i] + run.episodes.format_errors[i];
const most = f => group => -Math.max(...group.members.map(f));

const ORDERS = {
  'first steps': group => run.logs[group.log].step,
  'last steps': group => -run.logs[group.log].step,
  'lowest reward': group => group.mean,
  'highest reward': group => -group.mean,
  'widest spread': group => -group.spread,
  longest: most(i => run.episodes.length[i]),
  'most turns': most(i => run.episodes.turns[i]),
  'failed calls': most(failures),
};

/** Returns whether each episode passes, and the numbers of the groups with one, in order. */
function select(filter) {
  const {status, reward, tools} = run.episodes;
  const query = filter.q.toLowerCase();
  const low = filter.low === '' ? -Infinity : Number(filter.low);
  const high = filter.high === '' ? Infinity : Number(filter.high);
  const passes = new Uint8Array(reward.length);
  const chosen = [];
  groups.forEach((group, number) => {
    const log = run.logs[group.log];
    if (filter.set && filter.set !== log.name) return;
    if (filter.step && Number(filter.step) !== log.step) return;
    let any = false;
    for (const i of group.members) {
      if (filter.status && filter.status !== status[i]) continue;
      if (filter.tool && !tools[i].includes(filter.tool)) continue;
      if (filter.error && !ERRORS[filter.error](i)) continue;
      // An episode without a reward passes if no reward is asked for.
      const r = reward[i] ?? (filter.low || filter.high ? NaN : 0);
      if (!(r >= low && r <= high)) continue;
      if (query && texts && !texts[i].includes(query)) continue;
      passes[i] = 1;
      any = true;
    }
    if (any) chosen.push(number);
  });
  const key = ORDERS[filter.order] ?? ORDERS['first steps'];
  const keys = new Map(chosen.map(number => [number, key(groups[number])]));
  // A group without any reward comes last.
  const rank = number => (Number.isNaN(keys.get(number)) ? Infinity : keys.get(number));
  chosen.sort((a, b) => (rank(a) < rank(b) ? -1 : rank(a) > rank(b) ? 1 : a - b));
  return {passes, chosen};
}

/** Makes an element; text is only ever set as text. */
function make(tag, className = '', text = '') {
  const element = document.createElement(tag);
  if (className) element.className = className;
  if (text !== '') element.textContent = text;
  return element;
}

const get = id => document.getElementById(id);

function format(x) {
  if (x === null || x === undefined || Number.isNaN(x)) return '–';
  if (typeof x !== 'number') return String(x);
  if (Number.isInteger(x)) return (x || 0).toLocaleString('en'); // -0 is 0.
  const size = Math.abs(x);
  if (size >= 1000) return Math.round(x).toLocaleString('en');
  return size >= 1e-3 ? String(Number(x.toPrecision(3))) : x.toExponential(1);
}
