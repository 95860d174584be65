# ruff: noqa: E501, S608 - the templates are data, and none of the SQL is run
"""Training prompts, made by a program.

A prompt is a task about a topic, with a format, a size and a way of asking drawn at random. More
than half are structured (JSON, SQL, code, editing, tables, extraction), since that is where
speculation pays; the rest keeps the drafters honest on prose. None of them is taken from the
prompt library, which is the held-out test.

The same seed gives the same prompts on every machine.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass

CATEGORIES = (
    "json", "sql", "code", "edit", "table", "extraction", "markup",
    "qa", "explain", "creative", "dialogue", "rewrite", "summary", "list", "retrieval",
)  # fmt: skip
STRUCTURED = frozenset({"json", "sql", "code", "edit", "table", "extraction", "markup"})

_SHARES = {
    "json": 15, "sql": 11, "code": 17, "edit": 10, "table": 7, "extraction": 9, "markup": 4,
    "qa": 5, "explain": 4, "creative": 6, "dialogue": 3, "rewrite": 2, "summary": 3, "list": 4,
}  # fmt: skip

_TOPICS = """bakery;bicycle shop;weather station;electric car;hospital;ancient Rome;coral reef;online payment;
football league;garden centre;warehouse robot;music festival;airport;solar farm;chess club;public library;beehive;
mountain hike;train station;movie review;restaurant menu;employee directory;shop inventory;customer order;
hotel booking;university course;blog post;temperature sensor;bank account;zoo;recipe collection;video game;
photo album;volcano;art museum;cat shelter;dog kennel;lunar mission;deep sea dive;lost city;letter archive;
winter market;dragon legend;detective agency;friendship app;time machine;night garden;river survey;coffee roastery;
violin workshop;desert expedition;snow report;carnival;dream journal;cargo ship;city street map;bug tracker;
database server;web server;sorting algorithm;text file;calendar;fraction;prime number;matrix;shopping list;
health clinic;job interview;email inbox;travel plan;rental car;parking garage;gym membership;yoga class;
swimming pool;tennis tournament;marathon;cycling race;basketball team;hockey season;ski resort;surf school;
fishing boat;lighthouse;harbour;ferry line;bus timetable;tram network;taxi fleet;delivery drone;post office;
courier service;pizza delivery;sushi bar;ice cream van;tea house;vineyard;brewery;cheese factory;dairy farm;
wheat field;orchard;greenhouse;flower shop;seed catalogue;forest trail;national park;bird watching log;
whale migration;penguin colony;insect collection;fossil dig;dinosaur exhibit;planetarium;telescope;satellite;
rocket launch;space station;asteroid;galaxy;periodic table;chemistry lab;physics experiment;biology class;
DNA sample;vaccine trial;pharmacy;dentist;optician;veterinary clinic;ambulance;fire brigade;police report;
court case;law firm;tax form;invoice;insurance claim;mortgage;stock portfolio;crypto wallet;savings goal;
household budget;grocery receipt;loyalty card;gift shop;toy store;bookshop;record label;radio station;podcast;
news feed;weather app;chat application;forum thread;social network profile;user account;login session;
password reset;access log;error log;audit trail;backup job;file system;message queue;cache;load balancer;
web crawler;search engine;recommendation engine;spam filter;image gallery;video playlist;music library;
lyrics sheet;concert ticket;theatre play;opera house;ballet school;film studio;animation project;comic book;
novel;poetry reading;writing workshop;language course;dictionary;translation agency;grammar quiz;spelling bee;
exam timetable;school cafeteria;kindergarten;scholarship;research paper;thesis;conference;workshop schedule;
meeting room;team calendar;project plan;sprint board;release note;feature flag;test suite;code review;
build pipeline;container image;cloud bill;network switch;router;smart home;thermostat;light bulb;door lock;
security camera;vacuum robot;washing machine;fridge;oven;kettle;blender;sewing machine;tool box;hardware store;
furniture catalogue;apartment listing;house renovation;moving company;construction site;bridge;skyscraper;
tunnel;dam;wind turbine;power grid;battery;recycling centre;water treatment;air quality;earthquake;hurricane;
flood warning;tide table;moon phase;sunrise;rainbow;thunderstorm;glacier;waterfall;cave;island;canyon;savanna;
rainforest;tundra;campsite;backpack;tent;compass;treasure map;pirate crew;castle;knight;wizard school;robot friend;
haunted house;secret tunnel;clockmaker;painter;sculptor;photographer;journalist;teacher;nurse;pilot;sailor;
farmer;chef;baker;carpenter;plumber;electrician;tailor;barber;librarian;scientist;astronaut;grandmother;twin;
birthday party;wedding;family tree;reunion;picnic;barbecue;holiday;road trip;train ride;museum visit;first snow;
rainy day;morning walk;street musician;old bridge;broken umbrella;missing key;lucky coin;paper boat;kite;
chessboard;crossword;sudoku;card game;board game;dice;puzzle;quiz night;leaderboard;tournament bracket;
fantasy league;player statistics;scoreboard;referee;stadium;ticket office;queue;vending machine;elevator;escalator;
traffic light;crosswalk;roundabout;toll road;fuel station;charging point;car wash;tyre shop;motorcycle;scooter;
helicopter;hot air balloon;submarine;canoe;sailing regatta;rowing club;archery;climbing gym;dance studio;
choir;orchestra;piano lesson;guitar tab;drum kit;microphone;headphones;speaker;keyboard;monitor;laptop;tablet;
phone contract;SIM card;email campaign;survey;questionnaire;poll;election;city council;museum ticket;
visitor counter;donation;charity run;volunteer roster;food bank;community garden;neighbourhood newsletter"""
TOPICS = tuple(topic.strip() for topic in _TOPICS.split(";"))

_FIELDS = """id;name;title;type;price;quantity;status;date;email;phone;address;city;country;category;rating;
description;author;owner;color;size;weight;height;start_time;end_time;duration;score;level;age;salary;department;
manager_id;created_at;updated_at;is_active;tags;notes;currency;amount;discount;stock;supplier;location;capacity;
priority;due_date;language;version;url;count;average;total;unit;brand;model;year;genre;speed;distance;temperature;
humidity;latitude;longitude;username;role;first_name;last_name;birthday;order_id;customer_id;product_id;invoice_no"""
FIELDS = tuple(field.strip() for field in _FIELDS.split(";"))

_FIRST = (
    "Anna Ben Carla David Elena Farid Grace Hiro Ines Jonas Kira Liam Maya Noah Olga Pedro Quinn Rosa Samir Tara "
    "Uma Victor Wendy Xavier Yuki Zoe Amir Beth Chen Dora Emil Fiona Goran Hana Ivan Julia Kofi Lena Marco Nina"
).split()
_LAST = (
    "Adams Becker Costa Dubois Eriksen Fischer Garcia Hughes Ito Jensen Kim Lopez Moreau Novak Okafor Patel "
    "Quist Rossi Silva Tanaka Ueda Vargas Weber Xu Young Zimmer Brown Clark Evans Foster Green Hall"
).split()
_CITIES = (
    "Lisbon;Oslo;Vienna;Kyoto;Toronto;Nairobi;Lima;Prague;Dublin;Seoul;Porto;Boston;Denver;Hamburg;Milan;Ghent;"
    "Austin;Bergen;Geneva;Madrid;Athens;Cairo;Delhi;Sydney;Chicago;Bristol;Leeds;Lyon;Naples;Zagreb"
).split(";")
_MONTHS = "January February March April May June July August September October November December".split()
_LANGUAGES = (
    ("Python", 10), ("JavaScript", 4), ("TypeScript", 2), ("Java", 2), ("C", 1), ("C++", 1), ("Go", 1), ("Rust", 1),
    ("bash", 1), ("Ruby", 1), ("PHP", 1), ("C#", 1),
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class TrainingPrompt:
    """One chat that asks the target for a response. ``system`` None means the template's default."""

    category: str
    user: str
    system: str | None = None

    def messages(self) -> list[dict[str, str]]:
        head = [{"role": "system", "content": self.system}] if self.system else []
        return [*head, {"role": "user", "content": self.user}]


class _Maker:
    """Draws the parts. One instance makes one stream of prompts."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)

    def pick(self, options: str | tuple[str, ...] | list[str]) -> str:
        """One of the options; a string is split at ``|``."""
        return self.rng.choice(options.split("|") if isinstance(options, str) else options)

    def topic(self) -> str:
        return self.rng.choice(TOPICS)

    def a_topic(self) -> str:
        topic = self.topic()
        return f"{'an' if topic[0].lower() in 'aeiou' else 'a'} {topic}"

    def number(self, low: int, high: int) -> int:
        return self.rng.randint(low, high)

    def fields(self, low: int, high: int) -> list[str]:
        return self.rng.sample(FIELDS, self.number(low, high))

    def person(self) -> str:
        return f"{self.rng.choice(_FIRST)} {self.rng.choice(_LAST)}"

    def day(self) -> str:
        return self.pick(
            [
                f"{self.rng.choice(_MONTHS)} {self.number(1, 28)}, {self.number(1995, 2026)}",
                f"{self.number(1995, 2026)}-{self.number(1, 12):02d}-{self.number(1, 28):02d}",
                f"{self.number(1, 28)} {self.rng.choice(_MONTHS)}",
            ]
        )

    def money(self) -> str:
        return self.pick([f"${self.number(2, 999)}.{self.number(0, 99):02d}", f"{self.number(5, 900)} euros"])

    def language(self) -> str:
        return self.rng.choices([n for n, _ in _LANGUAGES], [w for _, w in _LANGUAGES])[0]

    def joined(self, words: list[str]) -> str:
        return ", ".join(words[:-1]) + self.pick(" and | and |, ") + words[-1] if len(words) > 1 else words[0]

    def only(self, what: str) -> str:
        """A closing remark that asks for the bare format; often left out."""
        if self.rng.random() < 0.45:
            return ""
        return " " + self.pick(
            [
                f"Return only the {what}.",
                f"Output only the {what}, no explanation.",
                f"Answer with {what} only.",
                f"No comments, just the {what}.",
                f"Reply with the {what} and nothing else.",
                f"Do not add any text besides the {what}.",
                "Keep it short.",
                "Be concise.",
            ]
        )

    def sentence(self) -> str:
        """A made-up sentence with facts in it, for extraction, summaries and retrieval."""
        who, where, topic = self.person(), self.rng.choice(_CITIES), self.topic()
        return self.pick(
            [
                f"{who} opened the {topic} in {where} on {self.day()}.",
                f"On {self.day()}, {who} ordered {self.number(2, 40)} items for the {topic} at {self.money()} each.",
                f"The {topic} in {where} has {self.number(3, 900)} visitors a day and costs {self.money()} to enter.",
                f"{who}, aged {self.number(19, 78)}, works at the {topic} in {where} as a {self.job()}.",
                f"The meeting about the {topic} was moved to {self.day()} because {who} was ill.",
                f"{who} can be reached at {self.email(who)} or +{self.number(1, 60)} {self.number(100, 999)} "
                f"{self.number(1000, 9999)}.",
                f"Last {self.pick('week|month|year')} the {topic} earned {self.money()} more than expected.",
                f"Nobody in {where} knew why the {topic} had closed at {self.number(1, 12)} o'clock.",
                f"{who} paid {self.money()} for the {topic} and waited {self.number(2, 50)} minutes.",
                f"The new {topic} replaces the one built in {self.number(1890, 2015)} by {who}.",
                f"A {self.job()} from {where} repaired the {topic} within {self.number(2, 14)} days.",
                f"Room {self.number(100, 900)} of the {topic} is kept at {self.number(12, 26)} degrees.",
                f"Every {self.pick('Monday|Tuesday|Friday|Sunday')}, {self.number(10, 90)} people meet at the {topic}.",
                f"The report says that the {topic} needs {self.number(2, 30)} more {self.job()}s.",
                f"{who} and {self.person()} disagree about the {topic}, but both like {where}.",
            ]
        )

    def job(self) -> str:
        return self.pick(
            "manager|engineer|nurse|teacher|driver|designer|cook|guide|clerk|analyst|mechanic|singer|gardener|editor"
        )

    def email(self, who: str) -> str:
        first, last = who.lower().split()
        return f"{self.pick([first, first + '.' + last, first[0] + last])}@{self.pick('example|mail|post|acme')}.com"

    def paragraph(self, low: int, high: int) -> str:
        return " ".join(self.sentence() for _ in range(self.number(low, high)))

    # --- structured -----------------------------------------------------------------------

    def json(self) -> str:
        fields = self.fields(2, 7)
        verb = self.pick("Write|Create|Generate|Give me|Produce|Make|Show|Return")
        kind = self.rng.random()
        if kind < 0.3:
            text = f"{verb} a JSON object describing {self.a_topic()} with the {self.pick('fields|keys|properties')} "
            text += self.joined(fields) + "."
        elif kind < 0.55:
            text = f"{verb} a JSON {self.pick('array|list')} of {self.number(2, 8)} {self.topic()} "
            text += self.pick("entries|records|objects|items") + f", each with {self.joined(fields)}."
        elif kind < 0.65:
            text = f"{verb} a JSON object for {self.a_topic()}."
        elif kind < 0.75:
            text = f"{verb} a nested JSON {self.pick('document|object')} for {self.a_topic()}: it has "
            text += f"{self.joined(fields[:3])}, and a list of {self.topic()} objects with {self.joined(self.fields(2, 4))}."
        elif kind < 0.82:
            text = f"{verb} a JSON schema for {self.a_topic()} with {self.joined(fields)}."
        elif kind < 0.9:
            text = f"{verb} a JSON configuration file for {self.a_topic()} "
            text += f"with {self.pick('three|four|five|six')} settings."
        elif kind < 0.95:
            text = f"{verb} a JSON API response for GET /{self.topic().replace(' ', '-')}s with {self.number(2, 5)} results."
        else:
            who = self.person()
            record = {
                "name": who,
                "email": self.email(who),
                "city": self.rng.choice(_CITIES),
                "age": self.number(18, 80),
            }
            chosen = json.dumps(dict(self.rng.sample(list(record.items()), self.number(2, 4))))
            text = (
                f"Here is one {self.topic()} record: {chosen}. {verb} {self.number(2, 6)} more in the same JSON format."
            )
        return text + self.only("JSON")

    def sql(self) -> str:
        topic = self.topic()
        table = self.pick([topic.replace(" ", "_") + "s", topic.split()[-1] + "s", topic.replace(" ", "_")]).lower()
        columns = self.fields(3, 7)
        dialect = self.pick("|||PostgreSQL |MySQL |SQLite |standard ")
        listed = f"{table}({', '.join(columns)})"
        other = self.fields(3, 5)
        second = self.pick("orders|events|payments|visits|reviews|users|items|staff|logs|bookings")
        kind = self.number(0, 11)
        if kind == 0:
            text = f"Write a {dialect}CREATE TABLE statement for {table} with columns {self.joined(columns)}."
        elif kind == 1:
            text = f"Create {dialect}SQL tables for {self.a_topic()} with primary and foreign keys."
        elif kind == 2:
            text = f"Given the table {listed}, write a {dialect}SQL query that returns the {self.number(3, 20)} rows "
            text += f"with the {self.pick('highest|lowest')} {columns[0]}."
        elif kind == 3:
            text = f"Write a {dialect}SQL query that counts {table} grouped by {self.pick(columns)}."
        elif kind == 4:
            text = f"Write {self.number(3, 8)} {dialect}INSERT statements for the table {listed}."
        elif kind == 5:
            text = (
                f"Tables: {listed}, {second}(id, {columns[0]}, {', '.join(other)}). Write a query that joins both and "
            )
            text += f"shows {columns[1]} and {other[0]}{self.pick([' for each row', ' per month', ' sorted by ' + other[1]])}."
        elif kind == 6:
            text = f"Write a {dialect}SQL UPDATE that sets {columns[0]} where {columns[1]} is "
            text += f"{self.pick('NULL|empty|greater than 10|older than a year')} in {table}."
        elif kind == 7:
            text = f"Write {self.number(3, 6)} useful SQL queries for the table {listed}."
        elif kind == 8:
            text = f"Create a view in {dialect}SQL that shows the monthly {self.pick('total|average|count')} of "
            text += f"{columns[2]} from {table}."
        elif kind == 9:
            text = f"Explain this query and then improve it: SELECT * FROM {table} WHERE {columns[0]} = {self.number(1, 99)} "
            text += f"ORDER BY {columns[1]};"
        elif kind == 10:
            text = f"Write the {dialect}SQL to delete duplicate rows from {table} by {columns[0]}."
        else:
            text = f"Design a {dialect}database schema for {self.a_topic()} and write the SQL."
        return text + self.only("SQL")

    def code(self) -> str:
        language, topic = self.language(), self.topic()
        verb = self.pick("Write|Implement|Create|Give me|Show me|Please write|I need")
        names = self.fields(2, 4)
        action = self.pick(
            "adds two numbers|sorts a list of numbers|reverses a string|counts words in a text|finds the largest value|"
            "removes duplicates from a list|checks whether a number is prime|computes the factorial of n|"
            "returns the nth Fibonacci number|merges two sorted lists|checks if a string is a palindrome|"
            "reads a CSV file and prints each row|parses a date string|validates an email address|"
            "converts Celsius to Fahrenheit|computes the average of a list|groups items by a key|"
            "flattens a nested list|counts the vowels in a string|performs a binary search|"
            "computes the greatest common divisor|generates a random password|rounds prices to two decimals|"
            "splits a list into chunks|transposes a matrix|multiplies two matrices|finds the shortest word|"
            "counts how often each letter occurs|writes lines to a file|loads a JSON file|sums the digits of a number|"
            "converts a number to binary|removes punctuation from text|checks for balanced brackets|"
            "finds all pairs that sum to a target|rotates a list by k places|capitalizes each word|"
            "calculates compound interest|computes the distance between two points|filters even numbers"
        )
        kind = self.number(0, 13)
        if kind <= 3:
            text = f"{verb} a {language} function that {action}."
        elif kind == 4:
            text = f"{verb} a {language} class for {self.a_topic()} with the attributes {self.joined(names)} and "
            text += f"{self.pick('two|three|four')} methods."
        elif kind == 5:
            text = f"{verb} a {language} program that {action} and prints the result."
        elif kind == 6:
            text = f"{verb} unit tests in {language} for a function that {action}."
        elif kind == 7:
            text = f"{verb} a Python dataclass named {topic.title().replace(' ', '')} with {self.joined(names)}."
        elif kind == 8:
            text = f"{verb} a {language} function {self.pick('get|find|load|update|create')}_"
            text += f"{topic.replace(' ', '_').lower()}({', '.join(names)}) with a docstring and an example."
        elif kind == 9:
            text = f"{verb} a {language} script that manages {self.a_topic()} from the command line."
        elif kind == 10:
            framework = self.pick("Flask|FastAPI|Express|Django")
            text = f"{verb} a {framework} endpoint that returns {topic} data as JSON."
        elif kind == 11:
            text = f"{verb} a regular expression in {language} that matches "
            text += self.pick("phone numbers|dates|email addresses|URLs|hex colours|IP addresses|postal codes") + "."
        elif kind == 12:
            text = f"{verb} a {language} {self.pick('linked list|stack|queue|binary tree|graph|cache|counter|timer')} "
            text += f"{self.pick('class|implementation')} with comments."
        else:
            text = f"How do I write {language} code that {action}?"
        text += self.pick(
            ["", "", "", " Add a docstring.", " Use type hints.", " Include an example call.", " Handle errors."]
        )
        return text + self.only("code")

    def snippet(self) -> str:
        """A small piece of Python to edit, explain or test."""
        noun = self.topic().split()[-1].lower()
        a, b, c = self.fields(3, 3)
        low, high = self.number(1, 9), self.number(10, 99)
        klass = noun.title()
        return self.pick(
            [
                f"def total_{noun}({a}s):\n    result = 0\n    for {a} in {a}s:\n        result = result + {a}\n    return result",
                f"def find_{noun}(items, {a}):\n    for item in items:\n        if item['{b}'] == {a}:\n            return item\n    return None",
                f'class {klass}:\n    def __init__(self, {a}, {b}):\n        self.{a} = {a}\n        self.{b} = {b}\n\n    def describe(self):\n        return f"{{self.{a}}}: {{self.{b}}}"',
                f"def filter_{noun}s(rows):\n    out = []\n    for row in rows:\n        if row['{a}'] > {low} and row['{b}'] < {high}:\n            out.append(row['{c}'])\n    return out",
                f"def load_{noun}(path):\n    f = open(path)\n    lines = f.readlines()\n    f.close()\n    data = []\n    for line in lines:\n        data.append(line.strip().split(','))\n    return data",
                f"function get{klass}({a}, {b}) {{\n  var result = [];\n  for (var i = 0; i < {a}.length; i++) {{\n    if ({a}[i].{c} == {b}) {{\n      result.push({a}[i]);\n    }}\n  }}\n  return result;\n}}",
                f"def average_{a}({noun}s):\n    total = sum({noun}['{a}'] for {noun} in {noun}s)\n    return total / len({noun}s)",
                f"{noun}s = {{}}\n\ndef add_{noun}({a}, {b}={low}):\n    {noun}s[{a}] = {b}\n\ndef remove_{noun}({a}):\n    del {noun}s[{a}]",
                f"class {klass}Store:\n    def __init__(self):\n        self.items = []\n\n    def add(self, {a}, {b}):\n        self.items.append(({a}, {b}))\n\n    def count(self):\n        return len(self.items)",
                f"def convert_{noun}({a}):\n    if {a} < {low}:\n        return 'low'\n    elif {a} < {high}:\n        return 'medium'\n    else:\n        return 'high'",
                f"import json\n\ndef save_{noun}s({noun}s, path):\n    with open(path, 'w') as f:\n        json.dump({noun}s, f)\n\ndef read_{noun}s(path):\n    with open(path) as f:\n        return json.load(f)",
                f"for i in range({low}, {high}):\n    {a} = i * {low}\n    if {a} % 2 == 0:\n        print('{noun}', {a})",
            ]
        )

    def edit(self) -> str:
        code = self.snippet()
        js = code.startswith("function")
        fence = f"```{'javascript' if js else 'python'}\n{code}\n```" if self.rng.random() < 0.6 else code
        a = self.pick(FIELDS)
        wish = self.pick(
            [
                "Add type hints to this code.", "Add a docstring to each function.", "Rename the variables to be clearer.",
                "Add error handling to this code.", f"Add a parameter named {a} to this code.", "Add comments to this code.",
                "Refactor this code.", "Rewrite this code to be shorter.", "Fix any bugs in this code.",
                f"Add a method or function that returns the {a}.", "Convert this code to use a list comprehension.",
                "Add logging to this code.", "Make this code handle an empty input.", "Write tests for this code.",
                f"Change this code so that it also prints the {a}.", "Add input validation to this code.",
                "Translate this code to JavaScript." if not js else "Translate this code to Python.",
                "Rewrite this code with early returns.", f"Replace every use of the first argument's name by {a}.",
            ]
        )  # fmt: skip
        closing = self.pick(
            ["", "", " Return the full code.", " Show the whole updated code.", " Keep everything else the same."]
        )
        return f"{wish}{closing}\n\n{fence}" if self.rng.random() < 0.7 else f"{fence}\n\n{wish}{closing}"

    def table(self) -> str:
        fields = self.fields(3, 6)
        verb = self.pick("Make|Create|Write|Give me|Produce|Draw")
        kind = self.number(0, 5)
        if kind <= 1:
            text = f"{verb} a Markdown table about {self.a_topic()} with the columns {self.joined(fields)} and "
            text += f"{self.number(3, 10)} rows."
        elif kind == 2:
            text = f"{verb} a CSV file with {self.number(4, 12)} rows about {self.a_topic()}. The header is {','.join(fields)}."
        elif kind == 3:
            text = f"{verb} a Markdown table comparing {self.a_topic()}, {self.a_topic()} and {self.a_topic()} by "
            text += self.joined(fields[:4]) + "."
        elif kind == 4:
            rows = "\n".join(
                f"{self.person()}: {self.number(1, 99)}, {self.rng.choice(_CITIES)}" for _ in range(self.number(3, 6))
            )
            text = (
                f"Turn this list into a Markdown table with the columns Name, {fields[0].title()} and City:\n{rows}\n"
            )
        else:
            text = f"{verb} a weekly {self.pick('schedule|plan|timetable')} for {self.a_topic()} as a table."
        return text + self.only("table")

    def extraction(self) -> str:
        text = self.paragraph(1, 4)
        wanted = self.joined(
            self.rng.sample(
                ["names", "dates", "places", "prices", "ages", "jobs", "numbers", "emails", "phone numbers"],
                self.number(2, 4),
            )
        )
        ask = self.pick(
            [
                f"Extract the {wanted} from this text as JSON.", f"List all {wanted} in the text below.",
                f"Find the {wanted} in the following text and return a JSON object.",
                f"Which {wanted} does the text mention? Answer as a bulleted list.",
                f"Read the text and fill in these fields: {self.joined(self.fields(2, 5))}.",
                f"Extract every person with {wanted} as a JSON array.", f"Put the {wanted} into a Markdown table.",
                "Extract the facts as key: value lines.", "Classify each sentence by topic and return JSON.",
            ]
        )  # fmt: skip
        label = self.pick(["Text: ", "", '"', "Input:\n"])
        quoted = f"{label}{text}" + ('"' if label == '"' else "")
        return (f"{ask}\n\n{quoted}" if self.rng.random() < 0.75 else f"{quoted}\n\n{ask}") + self.only("result")

    def markup(self) -> str:
        fields = self.fields(3, 6)
        verb = self.pick("Write|Create|Generate|Show me")
        return self.pick(
            [
                f"{verb} an HTML page about {self.a_topic()}.", f"{verb} an HTML form with inputs for {self.joined(fields)}.",
                f"{verb} a YAML configuration for {self.a_topic()} with {self.joined(fields)}.",
                f"{verb} an XML document describing {self.a_topic()} with the elements {self.joined(fields)}.",
                f"{verb} CSS for a page about {self.a_topic()}.", f"{verb} a Dockerfile for {self.a_topic()} web app.",
                f"{verb} a TOML file with settings for {self.a_topic()}.", f"{verb} an .ini file for {self.a_topic()}.",
                f"{verb} an HTML table with the columns {self.joined(fields)} and {self.number(3, 6)} rows.",
                f"{verb} a README in Markdown for a project about {self.a_topic()}.",
                f"{verb} a Makefile for a project named {self.topic().replace(' ', '-')}.",
            ]
        ) + self.only("file")  # fmt: skip

    # --- prose ----------------------------------------------------------------------------

    def qa(self) -> str:
        topic, other = self.topic(), self.topic()
        return self.pick(
            [
                f"What is {self.a_topic()}?", f"Why is the {topic} important?", f"How does {self.a_topic()} work?",
                f"What are the main parts of {self.a_topic()}?", f"What is the difference between a {topic} and a {other}?",
                f"When was the first {topic} built, and where?", f"Who works at {self.a_topic()}?",
                f"Is it better to have a {topic} or a {other}? Why?", f"How much does {self.a_topic()} cost to run?",
                f"What should I know before visiting {self.a_topic()}?", f"What can go wrong with {self.a_topic()}?",
                f"Can you tell me how to start {self.a_topic()} in {self.rng.choice(_CITIES)}?",
                f"What is {self.number(12, 99)} {self.pick('times|plus|minus')} {self.number(3, 99)}? Show your work.",
                f"A {topic} sells {self.number(3, 60)} items at {self.money()} each. How much is that? Think step by step.",
                f"What is the capital of {self.pick('France|Japan|Kenya|Peru|Norway|Egypt|Canada|India|Spain|Chile')}?",
                f"How do I fix {self.a_topic()} that does not work?", f"What are the advantages and disadvantages of {self.a_topic()}?",
            ]
        )  # fmt: skip

    def explain(self) -> str:
        return self.pick("Explain|Describe|Tell me about|Teach me about|Give an overview of") + " " + self.a_topic() + self.pick(
            [".", " to a child.", " in one paragraph.", " in simple words.", " step by step.", " for an expert.",
             " with an example.", f" in {self.number(3, 8)} sentences.", " and its history.", " like I am five."]
        )  # fmt: skip

    def creative(self) -> str:
        style = self.pick("||short |funny |sad |dark |gentle |mysterious |rhyming |strange |hopeful ")
        form = self.pick(
            "poem|story|haiku|song|fairy tale|limerick|monologue|letter|diary entry|legend|scene|sonnet|fable|ballad"
        )
        extra = self.pick(
            ["", "", "", f" Set it in {self.rng.choice(_CITIES)}.", f" The hero is called {self.rng.choice(_FIRST)}.",
             f" Mention {self.a_topic()}.", " Use vivid images.", " End with a surprise.", f" About {self.number(80, 300)} words."]
        )  # fmt: skip
        return f"{self.pick('Write|Compose|Tell me|Invent|Make up')} a {style}{form} about {self.a_topic()}.{extra}"

    def dialogue(self) -> str:
        a, b = self.rng.sample(_FIRST, 2)
        return self.pick(
            [
                f"Write a dialogue between {a} and {b} about {self.a_topic()}.",
                f"You are the owner of {self.a_topic()}. A guest named {a} is angry. What do you say?",
                f"Pretend to be a {self.pick('pirate|robot|wizard|queen|ghost|detective|tour guide|alien')} who talks about "
                f"{self.a_topic()}.",
                f"Act as a {self.job()} and answer {a}'s question about {self.a_topic()}.",
                f"Write an interview with {self.person()}, a {self.job()} at {self.a_topic()}.",
                f"Let's role-play: we meet at {self.a_topic()} in {self.rng.choice(_CITIES)}. You start.",
                f"Write a chat between a customer and a {self.job()} about {self.a_topic()}.",
            ]
        )

    def rewrite(self) -> str:
        sentence = self.paragraph(1, 2)
        how = self.pick(
            "Rewrite this text more politely|Translate this to Spanish|Translate this to French|Make this shorter|"
            "Correct the grammar|Rewrite this in the past tense|Rewrite this as a formal email|Turn this into a headline|"
            "Rewrite this as a tweet|Paraphrase this|Make this more exciting"
        )
        return f"{how}: {sentence}"

    def summary(self) -> str:
        how = self.pick(
            ["Summarize the text in one sentence.", "Summarize this in three bullet points.", "What is the main idea?",
             "Write a short summary.", "Give the text a title and a summary.", f"Summarize in {self.number(10, 40)} words."]
        )  # fmt: skip
        text = self.paragraph(3, 7)
        return f"{how}\n\n{text}" if self.rng.random() < 0.7 else f"{text}\n\n{how}"

    def list(self) -> str:
        count = self.number(3, 12)
        return self.pick(
            [
                f"List {count} facts about {self.a_topic()}.", f"Brainstorm {count} unusual ideas for {self.a_topic()}.",
                f"Give me {count} names for {self.a_topic()}.", f"Write {count} quiz questions with answers about {self.a_topic()}.",
                f"Give step by step instructions for {self.a_topic()}.", f"Write a checklist for {self.a_topic()}.",
                f"Plan a {self.number(2, 7)} day trip to {self.rng.choice(_CITIES)} with {self.a_topic()}.",
                f"Write a recipe from {self.a_topic()} with ingredients and steps.", f"Write {count} tips about {self.a_topic()}.",
                f"Write an email to {self.person()} about {self.a_topic()}.", f"Write a product description for {self.a_topic()}.",
                f"Give {count} examples of {self.topic()} problems and their solutions.",
            ]
        )  # fmt: skip

    def retrieval(self) -> str:
        """A long context and a question or task about it."""
        parts = [self.paragraph(3, 7) for _ in range(self.number(5, 16))]
        if self.rng.random() < 0.4:
            parts = [f"## {self.topic().title()}\n{part}" for part in parts]
        fact = self.sentence()
        at = self.number(0, len(parts) - 1)
        parts[at] += " " + fact
        subject = self.pick([fact.split(" ")[0], " ".join(fact.split(" ")[:2]), self.topic()])
        ask = self.pick(
            [
                f"What does the text say about {subject}?", "Summarize the document in five sentences.",
                f"Quote the sentence that mentions {subject}.", "List every person and their job as JSON.",
                "Which dates are mentioned? Answer as a list.", f"Where is {subject} mentioned and what happened there?",
                "Make a table of people, places and dates.", "Extract all prices as a JSON array.",
            ]
        )  # fmt: skip
        body = "\n\n".join(parts)
        return f"{body}\n\n{ask}" if self.rng.random() < 0.6 else f"{ask}\n\n{body}"

    def style(self, text: str) -> str:
        """Small differences in how people type."""
        roll = self.rng.random()
        if roll < 0.06:
            return text[0].lower() + text[1:].rstrip(".")
        if roll < 0.12:
            return f"{self.pick('Please |Can you help me? |Hi! |Hello, |Task: |Question: ')}{text}"
        if roll < 0.15:
            return text + self.pick([" Thanks!", " Thank you.", " Please be brief.", " I am a beginner."])
        return text


_SYSTEMS = (
    "You are a helpful assistant.",
    "You are an expert programmer. Answer with code.",
    "You answer in JSON.",
    "You are a concise assistant.",
    "You are a data analyst who writes SQL.",
    "You are a creative writer.",
)


def training_prompts(seed: int, *, long: bool = False) -> Iterator[TrainingPrompt]:
    """An endless stream of distinct prompts.

    Args:
        seed: the stream's seed.
        long: long contexts only (about 500 to 2,000 tokens), else everything but them.
    """
    maker = _Maker(seed)
    makers: dict[str, Callable[[], str]] = {name: getattr(maker, name) for name in CATEGORIES}
    names, shares = list(_SHARES), list(_SHARES.values())
    seen: set[int] = set()
    while True:
        category = "retrieval" if long else maker.rng.choices(names, shares)[0]
        text = maker.style(makers[category]())
        system = maker.pick(_SYSTEMS) if maker.rng.random() < 0.05 else None
        key = hash((text, system))
        if key not in seen:
            seen.add(key)
            yield TrainingPrompt(category, text, system)
