-- From `parallel = { ... }` to what the passes are told. A strategy is a table of functions, each of which may be
-- missing; `strategies` lists the library's own in the order in which they act, and a script may add its own:
--
--   name                     for messages
--   options                  rows of util.options: the keys of `parallel` that it reads
--   check(p)                 p: the checked options of all strategies; refuses what can't be honoured
--   axes(p)                  list of { name =, size = ranks or "auto" (what is left), splits = "samples" | "stages" | nil }: the axes of the
--                            mesh that it adds; one that splits nothing cuts tensors by their placements
--   place(graph, p, mesh)    after the forward trace: tells graph:place where parameters and values lie
--   compile(o, p, mesh, graph, how)   adds to the options of graph:compile; how: see trace.train
--   fit(p, how, make)        make() traces and compiles a plan with what p says now: calls it until the plan fits, and
--                            returns its results
--   fits(p)                  whether fit would change anything; missing: it would
--   variants                 rows { key, { values, the plain one first } }: what `dtrain check --all` tries beside the
--                            library's own
local util = require "dtrain.util"

local M = {}

local own = { "data", "zero", "local_sgd", "tensor", "pipeline", "recompute" }
local library = util.map(own, function(name) return require("dtrain.strategy." .. name) end)

local form = { { "name", "string" }, { "options", "table" }, { "check", "function" }, { "axes", "function" },
  { "place", "function" }, { "compile", "function" }, { "fit", "function" }, { "variants", "table" } }

local Strategy = { __name = "strategy" }
Strategy.__index = Strategy

--- Checks `parallel` and returns what engine and trace ask: s.p (all options), s:mesh(ranks),
--- s:localize(graph, where), s:compile(options, mesh).
function M.new(given)
  local rows = { { "mesh", "table" }, { "strategies", "table", {} } }
  local list = table.move(library, 1, #library, 1, {})
  for i, s in ipairs(given.strategies or {}) do
    list[#list + 1] = util.options(("dt.job: parallel: strategies[%d]"):format(i), s, form)
  end
  local from = { mesh = "dtrain", strategies = "dtrain" }
  for i, s in ipairs(list) do
    for _, row in ipairs(s.options or {}) do
      if from[row[1]] then
        util.fail("dt.job: parallel: the option %s of strategy %s is %s's already; give it another name", row[1],
          s.name or ("strategies[%d]"):format(i - #library), from[row[1]])
      end
      from[row[1]] = s.name or "another strategy"
      rows[#rows + 1] = row
    end
  end
  local self = setmetatable({ list = list, p = util.options("dt.job: parallel", given, rows) }, Strategy)
  for _, s in ipairs(list) do if s.check then s.check(self.p) end end
  return self
end

-- Axes lie in this order unless the script says another: stages far apart, parts of tensors close together.
local outermost = { stages = 1, samples = 2 }

local function check_axis(s, axis, i, seen)
  local where = ("dt.job: parallel: axis %d of strategy %s"):format(i, s.name or "of yours")
  axis = util.options(where, axis, { { "name", "string", required = true }, { "size", "string|count", required = true },
    { "splits", "string", choices = { "samples", "stages" } } })
  if type(axis.size) == "string" and axis.size ~= "auto" then
    util.fail("%s: size wants \"auto\" or a number of ranks, got %s", where, util.show(axis.size))
  end
  if seen[axis.name] then
    util.fail("dt.job: parallel: two strategies add the axis %q; give the one of %s another name", axis.name, s.name or "yours")
  end
  for _, key in ipairs { axis.splits == "stages" and "stages" or false, axis.size == "auto" and "auto" or false } do
    if key and seen[key] then
      util.fail("dt.job: parallel: the axes %s and %s both %s; one can", seen[key], axis.name,
        key == "auto" and "take what is left of the ranks (size = \"auto\")" or "split stages")
    end
    if key then seen[key] = axis.name end
  end
  seen[axis.name] = axis
  return axis
end

--- All strategies' axes as they give them, in the order in which they lie on the mesh.
function Strategy:axes()
  local list, seen = {}, {}
  for _, s in ipairs(self.list) do
    for i, axis in ipairs(s.axes and s.axes(self.p) or {}) do list[#list + 1] = check_axis(s, axis, i, seen) end
  end
  local at = {}
  for i, axis in ipairs(list) do at[axis] = 1000 * (outermost[axis.splits] or 3) + i end
  if self.p.mesh then
    for _, name in ipairs(self.p.mesh) do
      local axis = seen[name]
      if type(axis) ~= "table" then
        util.fail("dt.job: parallel: mesh: there is no axis %s; %s", util.show(name),
          util.suggest(tostring(name), util.map(list, function(a) return a.name end)))
      end
      if axis.named then util.fail("dt.job: parallel: mesh names the axis %q twice", name) end
      axis.named = true
    end
    for _, axis in ipairs(list) do
      if not axis.named and axis.size ~= 1 then
        util.fail("dt.job: parallel: mesh = { ... } leaves out the axis %q of size %s; name every axis, outermost first",
          axis.name, axis.size)
      end
    end
    for i, name in ipairs(self.p.mesh) do at[seen[name]] = i end
  end
  table.sort(list, function(a, b) return at[a] < at[b] end)
  return list
end

-- "data = 2 x pipeline 2": axes of samples first, then by name; those of one rank are left out.
local function equation(axes)
  local list, terms, product = {}, {}, 1
  for _, a in ipairs(axes) do if a.size ~= "auto" and a.size > 1 then list[#list + 1] = a end end
  table.sort(list, function(a, b)
    if (a.splits == "samples") ~= (b.splits == "samples") then return a.splits == "samples" end
    return a.name < b.name
  end)
  for i, a in ipairs(list) do
    terms[i] = ("%s %d"):format(a.name, a.size)
    product = product * a.size
  end
  return #terms > 0 and table.concat(terms, " x ") or "1", product, #terms
end

--- The mesh of so many ranks: { { name =, size =, splits = "samples" | "stages" | nil } ... }, outermost axis first. An error shows
--- the equation.
function Strategy:mesh(ranks)
  local axes, rest = self:axes(), nil
  local text, product, terms = equation(axes)
  for _, a in ipairs(axes) do if a.size == "auto" then rest = a end end
  if rest and ranks % product ~= 0 then
    local low = ranks // product * product
    util.fail("dt.job: parallel: %d rank%s not divide by %s = %d; %s%d ranks would", ranks, ranks == 1 and " does" or "s do", text,
      product, low > 0 and low .. " or " or "", low + product)
  elseif not rest and product ~= ranks then
    local hint, samples, others = "", {}, product
    for _, a in ipairs(axes) do if a.splits == "samples" then samples[#samples + 1], others = a, others // a.size end end
    if #samples == 1 and ranks % others == 0 then hint = (' or %s = "auto" (%d)'):format(samples[1].name, ranks // others) end
    util.fail("dt.job: parallel: %s%s, but %d rank%s run; mpirun -n %d%s would do", terms > 0 and text:gsub(" ", " = ", 1) or
      "no axis has more than one rank", terms > 1 and " = " .. product or "", ranks, ranks == 1 and "" or "s", product, hint)
  end
  return util.map(axes, function(a)
    return { name = a.name, size = a == rest and ranks // product or a.size, splits = a.splits }
  end)
end

--- The axes of a mesh that have more than one rank, for people to read.
function M.wide(mesh)
  local out = {}
  for _, a in ipairs(mesh) do if a.size > 1 then out[#out + 1] = a end end
  return out
end

--- Which of the ranks that differ only on axes that split `what` ("samples", "stages") a rank is, from 0, and how many those are.
function M.among(mesh, rank, what)
  local at, n, below = 0, 1, 1
  for i = #mesh, 1, -1 do
    if mesh[i].splits == what then
      at = at + rank // below % mesh[i].size * n
      n = n * mesh[i].size
    end
    below = below * mesh[i].size
  end
  return at, n
end

local function each(self, what, ...)
  for _, s in ipairs(self.list) do if s[what] then s[what](...) end end
end

--- From the traced graph, in whole shapes, to that of the rank at `where` (job:where_is).
function Strategy:localize(graph, where)
  each(self, "place", graph, self.p, where.mesh)
  graph:localize { rank = where.rank, sequence = self.p.sequence and { "tensor" } or nil }
end

--- Whether plans are traced with several values of options: what was traced for another rank is of no use then.
function Strategy:tries()
  for _, s in ipairs(self.list) do if s.fit and (not s.fits or s.fits(self.p)) then return true end end
  return false
end

function Strategy:fit(how, make)
  for _, s in ipairs(self.list) do
    if s.fit then
      local inner = make
      make = function() return s.fit(self.p, how, inner) end
    end
  end
  return make()
end

function Strategy:compile(options, mesh, graph, how) each(self, "compile", options, self.p, mesh, graph, how) end

return M
